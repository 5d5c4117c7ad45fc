"""The logarithm of softmax, and its backward."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._range import choose
from ._softmax import checked_axis

__all__ = ["LogSoftmaxGrads", "log_softmax", "log_softmax_backward", "log_softmax_forward"]


class LogSoftmaxGrads(NamedTuple):
    """The gradient of :func:`log_softmax`."""

    x: Array


class Saved(NamedTuple):
    """What the backward needs."""

    y: Array
    axis: int


def forward(backend: Backend, x: Array, *, axis: int) -> tuple[Array, Saved]:
    """Return x − log Σ exp(x), shifted by the maximum so that nothing overflows."""
    y = backend.operation("log_softmax", x, axis=axis)
    if y is not None:
        return y, Saved(y, axis)
    xp = backend.namespace()
    wide = widen(xp, x)
    shifted = wide - xp.max(wide, axis=axis, keepdims=True) if x.shape[axis] else wide
    y = shifted - xp.log(xp.sum(xp.exp(shifted), axis=axis, keepdims=True))
    return cast(xp, y, x.dtype), Saved(y, axis)


def backward(backend: Backend, dy: Array, saved: Saved) -> LogSoftmaxGrads:
    """Return dy − exp(y) Σ dy."""
    xp, (y, axis) = backend.namespace(), saved
    dx = backend.operation("log_softmax_backward", dy, y, axis=axis)
    if dx is not None:
        return LogSoftmaxGrads(dx)
    dy_, p, n = widen(xp, dy), xp.exp(y), max(dy.shape[axis], 1)

    def plain() -> tuple[Array, Array]:
        dx = dy_ - p * xp.sum(dy_, axis=axis, keepdims=True)
        return dx, xp.isfinite(xp.sum(dx))

    def halved() -> Array:  # with dy / 2, and the mean of dy in place of its sum, which may overflow
        return (dy_ * 0.5 - p * (0.5 * n) * (xp.sum(dy_ * (1.0 / n), axis=axis, keepdims=True))) * 2.0

    return LogSoftmaxGrads(cast(xp, choose(backend, dy, plain, halved), dy.dtype))


OPERATION = Operation("log_softmax", forward, backward)


def log_softmax(x: Array, *, axis: int = -1) -> Array:
    r"""Return the logarithm of softmax: :math:`y_i = x_i - \log \sum_j e^{x_j}`.

    Parameters
    ----------
    x : array
        Floating, at least one axis. float16 and bfloat16 are computed in float32.
    axis : int
        The axis along which the exponentials sum to one.

    Returns
    -------
    array
        Of the shape and dtype of ``x``; finite also where softmax underflows to zero.
        A slice of −inf only gives NaN, as in softmax.

    Raises
    ------
    ShapeError, DTypeError
        If ``x`` has no such axis or is not floating.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.log_softmax(np.array([0.0, 1000.0]))
    array([-1000.,     0.])
    """
    return run(OPERATION, {"x": x}, checked_axis(x, axis))


def log_softmax_forward(x: Array, *, axis: int = -1) -> tuple[Array, Cache]:
    """Return ``(log_softmax(x), cache)``."""
    return run_with_cache(OPERATION, {"x": x}, checked_axis(x, axis))


def log_softmax_backward(dy: Array, cache: Cache) -> LogSoftmaxGrads:
    r"""Return the gradient :math:`dx = dy - e^y \sum_j dy_j`."""
    return run_backward(OPERATION, dy, cache, LogSoftmaxGrads)
