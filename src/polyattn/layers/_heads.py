"""Between a projection and attention: split into heads, query-key norm, rotary embedding; and the backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array, Backend
from ..functional import _rotary_embedding
from ..functional._rotary_embedding import Rotation
from ._layer import Layer


class Saved(NamedTuple):
    """What the backward needs."""

    norm: Any
    rotary: _rotary_embedding.Saved | None


def forward(
    backend: Backend, x: Array, heads: int, norm: Layer | None, rotation: Rotation | None, positions: Array | None,
    offset: int | Array,
) -> tuple[Array, Saved]:  # fmt: skip
    """(…, n, H·d) → (…, H, n, d): split into heads, then normalised and rotated if the layer does so."""
    norm_saved = rotary_saved = None
    x = split_heads(backend.namespace(), x, heads)  # (…, H, n, d)
    if norm is not None:
        x, norm_saved = norm.native_forward(backend, x)
    if rotation is not None:
        start, offset_array = (offset, None) if isinstance(offset, int) else (0, offset)
        x, rotary_saved = _rotary_embedding.forward(backend, x, positions, offset_array, start=start, rotation=rotation)
    return x, Saved(norm_saved, rotary_saved)


def backward(backend: Backend, dx: Array, saved: Saved, norm: Layer | None) -> tuple[Array, dict[str, Array]]:
    """(…, H, n, d) → (…, n, H·d): the gradient of the projection's result, and those of the norm's parameters."""
    dnorm: dict[str, Array] = {}
    if saved.rotary is not None:
        dx = _rotary_embedding.backward(backend, dx, saved.rotary).x
    if norm is not None:
        (dx,), dnorm = norm.native_backward(backend, dx, saved.norm)
    return join_heads(backend.namespace(), dx), dnorm


def split_heads(xp: Any, x: Array, heads: int) -> Array:
    """(…, n, H·d) → (…, H, n, d)."""
    x = xp.reshape(x, (*x.shape[:-1], heads, x.shape[-1] // heads))
    lead = tuple(range(x.ndim - 3))
    return xp.permute_dims(x, (*lead, x.ndim - 2, x.ndim - 3, x.ndim - 1))


def join_heads(xp: Any, x: Array) -> Array:
    """(…, H, n, d) → (…, n, H·d)."""
    lead = tuple(range(x.ndim - 3))
    x = xp.permute_dims(x, (*lead, x.ndim - 2, x.ndim - 3, x.ndim - 1))
    return xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))
