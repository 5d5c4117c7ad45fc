"""The Gaussian error linear unit, exact and by tanh, and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError
from ..kernels import cast, widen
from ._checks import expect_floating
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._erfc import erfc

__all__ = ["GeluGrads", "gelu", "gelu_backward", "gelu_forward"]

CUBIC = 0.044715
ROOT = math.sqrt(2 / math.pi)
FAR = 1e3  # there tanh is ±1 to the last digit, and long has been


class GeluGrads(NamedTuple):
    """The gradient of :func:`gelu`."""

    x: Array


class Saved(NamedTuple):
    """What the backward needs."""

    x: Array
    approximate: str


def forward(backend: Backend, x: Array, *, approximate: str) -> tuple[Array, Saved]:
    """Return x · Φ(x), Φ the normal distribution function or its tanh approximation."""
    xp = backend.namespace()

    def formula(x: Array) -> Array:
        wide = widen(xp, x)
        return cast(xp, wide * distribution(xp, wide, approximate), x.dtype)

    return backend.by_rows(formula, x, axes=0), Saved(x, approximate)


def backward(backend: Backend, dy: Array, saved: Saved) -> GeluGrads:
    """Return dy · (Φ(x) + x · Φ′(x))."""
    xp, (x, approximate) = backend.namespace(), saved

    def formula(dy: Array, x: Array) -> Array:
        wide = widen(xp, x)
        slope = distribution(xp, wide, approximate) + wide * density(xp, wide, approximate)
        return cast(xp, widen(xp, dy) * slope, x.dtype)

    return GeluGrads(backend.by_rows(formula, dy, x, axes=0))


def distribution(xp: Any, x: Array, approximate: str) -> Array:
    """Return Φ(x)."""
    if approximate == "none":
        return erfc(xp, x * -math.sqrt(0.5)) / 2
    return (1 + _tanh(xp, x)) / 2


def density(xp: Any, x: Array, approximate: str) -> Array:
    """Return Φ′(x)."""
    if approximate == "none":
        return xp.exp(x * x * -0.5) / math.sqrt(2 * math.pi)
    tanh, x = _tanh(xp, x), xp.clip(x, -FAR, FAR)
    return (1 - tanh * tanh) * (ROOT / 2) * (1 + 3 * CUBIC * x * x)


def _tanh(xp: Any, x: Array) -> Array:
    x = xp.clip(x, -FAR, FAR)  # its cube stays finite
    return xp.tanh(ROOT * (x + CUBIC * x * x * x))


OPERATION = Operation("gelu", forward, backward)


def gelu(x: Array, *, approximate: str = "none") -> Array:
    r"""Return :math:`x \, \Phi(x)`, element by element.

    Parameters
    ----------
    x : array
        Floating, any shape; float16 and bfloat16 are computed in float32.
    approximate : {"none", "tanh"}
        "none" is exact, :math:`\Phi(x) = \tfrac12 \mathrm{erfc}(-x/\sqrt2)`; "tanh" is
        :math:`\tfrac12 (1 + \tanh(\sqrt{2/\pi}\,(x + 0.044715\,x^3)))`.

    Raises
    ------
    DTypeError, ArgumentError
        If ``x`` is not floating, or ``approximate`` neither of the two.

    Notes
    -----
    Hendrycks and Gimpel, "Gaussian error linear units" (2016).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.gelu(np.array([-1.0, 0.0, 1.0])).round(6)
    array([-0.158655,  0.      ,  0.841345])
    """
    expect_floating(x=x)
    return run(OPERATION, {"x": x}, checked_approximate(approximate))


def gelu_forward(x: Array, *, approximate: str = "none") -> tuple[Array, Cache]:
    """Return ``(gelu(x), cache)``."""
    expect_floating(x=x)
    return run_with_cache(OPERATION, {"x": x}, checked_approximate(approximate))


def gelu_backward(dy: Array, cache: Cache) -> GeluGrads:
    """Return dy · (Φ(x) + x Φ′(x)), Φ as the forward took it."""
    return run_backward(OPERATION, dy, cache, GeluGrads)


def checked_approximate(approximate: str) -> dict[str, str]:
    """Return which of the two Φ is meant as a static argument."""
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return {"approximate": approximate}
