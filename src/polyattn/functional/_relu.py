"""The rectified linear unit and its backward."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ._checks import expect_floating
from ._dispatch import Operation, run, run_backward, run_with_cache

__all__ = ["ReluGrads", "relu", "relu_backward", "relu_forward"]


class ReluGrads(NamedTuple):
    """The gradient of :func:`relu`."""

    x: Array


class Saved(NamedTuple):
    """What the backward needs."""

    positive: Array


def forward(backend: Backend, x: Array) -> tuple[Array, Saved]:
    """Return max(x, 0); NaN stays NaN."""
    xp = backend.namespace()
    return xp.where(xp.less_equal(x, 0), xp.zeros_like(x), x), Saved(xp.greater(x, 0))


def backward(backend: Backend, dy: Array, saved: Saved) -> ReluGrads:
    """Return dy where x > 0, else 0."""
    xp, (positive,) = backend.namespace(), saved
    return ReluGrads(xp.where(positive, dy, xp.zeros_like(dy)))


OPERATION = Operation("relu", forward, backward)


def relu(x: Array) -> Array:
    """Return max(x, 0), element by element; the derivative at 0 is taken as 0.

    Parameters
    ----------
    x : array
        Floating, any shape.

    Raises
    ------
    DTypeError
        If ``x`` is not floating.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.relu(np.array([-1.0, 2.0]))
    array([0., 2.])
    """
    expect_floating(x=x)
    return run(OPERATION, {"x": x})


def relu_forward(x: Array) -> tuple[Array, Cache]:
    """Return ``(relu(x), cache)``."""
    expect_floating(x=x)
    return run_with_cache(OPERATION, {"x": x})


def relu_backward(dy: Array, cache: Cache) -> ReluGrads:
    """Return dy where x > 0, else 0."""
    return run_backward(OPERATION, dy, cache, ReluGrads)
