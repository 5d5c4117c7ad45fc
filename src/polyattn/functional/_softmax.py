"""Softmax and its backward."""

from __future__ import annotations

import numbers
from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ShapeError
from ..kernels import cast, widen
from ._checks import expect_floating, expect_rank, shown
from ._dispatch import Operation, run, run_backward, run_with_cache

__all__ = ["SoftmaxGrads", "softmax", "softmax_backward", "softmax_forward"]


class SoftmaxGrads(NamedTuple):
    """The gradient of :func:`softmax`."""

    x: Array


class Saved(NamedTuple):
    """What the backward needs."""

    y: Array
    axis: int


def forward(backend: Backend, x: Array, *, axis: int) -> tuple[Array, Saved]:
    """Return exp(x) / Σ exp(x), shifted by the maximum so that nothing overflows."""
    y = backend.operation("softmax", x, axis=axis)
    if y is not None:
        return y, Saved(y, axis)
    xp = backend.namespace()
    wide = widen(xp, x)
    exp = xp.exp(wide - xp.max(wide, axis=axis, keepdims=True)) if x.shape[axis] else wide
    y = exp / xp.sum(exp, axis=axis, keepdims=True)
    return cast(xp, y, x.dtype), Saved(y, axis)


def backward(backend: Backend, dy: Array, saved: Saved) -> SoftmaxGrads:
    """Apply the Jacobian diag(y) − y yᵀ without building it."""
    xp, (y, axis) = backend.namespace(), saved
    dx = backend.operation("softmax_backward", dy, y, axis=axis)
    if dx is not None:
        return SoftmaxGrads(dx)
    dx = widen(xp, dy) * 0.5 * y  # halved: a mean of the largest numbers may round to infinity
    dx = dx - y * xp.sum(dx, axis=axis, keepdims=True)
    return SoftmaxGrads(cast(xp, dx * 2.0, dy.dtype))


OPERATION = Operation("softmax", forward, backward)


def softmax(x: Array, *, axis: int = -1) -> Array:
    r"""Return the exponentials, normalised along an axis: :math:`y_i = e^{x_i} / \sum_j e^{x_j}`.

    Parameters
    ----------
    x : array
        Floating, at least one axis. float16 and bfloat16 are computed in float32.
    axis : int
        The axis that sums to one.

    Returns
    -------
    array
        Of the shape and dtype of ``x``. A slice of −inf only gives NaN; use the masks of
        :func:`attention` to exclude whole rows.

    Raises
    ------
    ShapeError, DTypeError
        If ``x`` has no such axis or is not floating.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.softmax(np.log(np.array([1.0, 2.0, 5.0])))
    array([0.125, 0.25 , 0.625])
    """
    return run(OPERATION, {"x": x}, checked_axis(x, axis))


def softmax_forward(x: Array, *, axis: int = -1) -> tuple[Array, Cache]:
    """Return ``(softmax(x), cache)``."""
    return run_with_cache(OPERATION, {"x": x}, checked_axis(x, axis))


def softmax_backward(dy: Array, cache: Cache) -> SoftmaxGrads:
    r"""Return the gradient :math:`dx = y \odot (dy - \sum_j dy_j y_j)`."""
    return run_backward(OPERATION, dy, cache, SoftmaxGrads)


def checked_axis(x: Array, axis: int) -> dict[str, int]:
    """Check the arguments of softmax or its logarithm, and return the axis as a static argument."""
    expect_floating(x=x)
    expect_rank("x", x, 1)
    if not isinstance(axis, int | numbers.Integral) or not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"axis: expected one of the {x.ndim} axes of x, got {shown(axis)}")
    return {"axis": int(axis)}
