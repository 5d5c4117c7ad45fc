"""The normalisation inside other layers: of the root mean square, the layer norm, or none."""

from __future__ import annotations

from typing import Any

from ..backend import Array, Backend
from ..errors import ArgumentError
from ..functional import _layer_norm, _rms_norm
from ..functional._operation import shown

NORMS = ("layer", "rms")
SAVED = 4
"""How many arrays a forward saves, whatever the norm."""


def checked_norm(name: str, norm: Any) -> str:
    """Return the name of a norm."""
    if norm not in NORMS:
        raise ArgumentError(f"{name}: expected one of {', '.join(NORMS)}, got {shown(norm)}")
    return str(norm)


def forward(
    backend: Backend, x: Array, weight: Array | None, bias: Array | None, *, norm: str | None, eps: float
) -> tuple[Array, tuple[Array | None, ...]]:
    """Return x normalised; as it is where there is no norm."""
    if norm is None:
        return x, (None,) * SAVED
    if norm == "layer":
        return _layer_norm.forward(backend, x, weight, bias, eps=eps)
    y, saved = _rms_norm.forward(backend, x, weight, eps=eps)
    return y, (*saved, None)


def backward(
    backend: Backend, dy: Array, saved: tuple[Any, ...], *, norm: str | None, eps: float
) -> tuple[Array, Array | None, Array | None]:
    """Return the gradients of x, weight and bias."""
    if norm is None:
        return dy, None, None
    if norm == "layer":
        return _layer_norm.backward(backend, dy, saved, eps=eps)
    return (*_rms_norm.backward(backend, dy, (saved[0], saved[1], saved[2]), eps=eps), None)
