"""The sigmoid linear unit, and its backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._checks import expect_floating
from ._dispatch import Operation, run, run_backward, run_with_cache

__all__ = ["SiluGrads", "silu", "silu_backward", "silu_forward"]


class SiluGrads(NamedTuple):
    """The gradient of :func:`silu`."""

    x: Array


class Saved(NamedTuple):
    """What the backward needs."""

    x: Array


def forward(backend: Backend, x: Array) -> tuple[Array, Saved]:
    """Return x · σ(x)."""
    xp = backend.namespace()

    def formula(x: Array) -> Array:
        wide = widen(xp, x)
        sigmoid, _ = logistic(xp, wide)
        return cast(xp, wide * sigmoid, x.dtype)

    return backend.by_rows(formula, x, axes=0), Saved(x)


def backward(backend: Backend, dy: Array, saved: Saved) -> SiluGrads:
    """Return dy · (σ(x) + x · σ′(x))."""
    xp, (x,) = backend.namespace(), saved

    def formula(dy: Array, x: Array) -> Array:
        wide = widen(xp, x)
        sigmoid, slope = logistic(xp, wide)
        return cast(xp, widen(xp, dy) * (sigmoid + wide * slope), x.dtype)

    return SiluGrads(backend.by_rows(formula, dy, x, axes=0))


def logistic(xp: Any, x: Array) -> tuple[Array, Array]:
    """Return σ(x) = 1 / (1 + exp(−x)) and its derivative, both to the last digits also where they are tiny."""
    zero = xp.zeros_like(x)
    # Of the two powers one is 1 and the other at most that: nothing overflows, nothing cancels.
    up, down = xp.exp(xp.minimum(x, zero)), xp.exp(-xp.maximum(x, zero))
    sigmoid = up / (up + down)
    return sigmoid, sigmoid * (down / (up + down))


OPERATION = Operation("silu", forward, backward)


def silu(x: Array) -> Array:
    r"""Return :math:`x \, \sigma(x) = x / (1 + e^{-x})`, element by element; also called swish.

    Parameters
    ----------
    x : array
        Floating, any shape; float16 and bfloat16 are computed in float32.

    Raises
    ------
    DTypeError
        If ``x`` is not floating.

    Notes
    -----
    Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function
    approximation in reinforcement learning" (2017).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.silu(np.array([-1.0, 0.0, 1.0])).round(6)
    array([-0.268941,  0.      ,  0.731059])
    """
    expect_floating(x=x)
    return run(OPERATION, {"x": x})


def silu_forward(x: Array) -> tuple[Array, Cache]:
    """Return ``(silu(x), cache)``."""
    expect_floating(x=x)
    return run_with_cache(OPERATION, {"x": x})


def silu_backward(dy: Array, cache: Cache) -> SiluGrads:
    """Return dy · (σ(x) + x σ′(x))."""
    return run_backward(OPERATION, dy, cache, SiluGrads)
