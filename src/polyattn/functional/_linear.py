"""The linear (affine) map and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ShapeError
from ..kernels import cast, widen
from ._checks import expect_arrays, expect_one_dtype, expect_rank, expect_shape
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._range import apply_linear, shrink, stands

__all__ = ["LinearGrads", "linear", "linear_backward", "linear_forward"]


class LinearGrads(NamedTuple):
    """The gradients of :func:`linear`; None for an absent bias."""

    x: Array
    weight: Array
    bias: Array | None


class Saved(NamedTuple):
    """What the backward needs."""

    x: Array
    weight: Array
    bias: Array | None


def forward(backend: Backend, x: Array, weight: Array, bias: Array | None) -> tuple[Array, Saved]:
    """Return x W + b."""
    y = backend.operation("linear", x, weight, bias)
    if y is not None:
        return y, Saved(x, weight, bias)
    xp = backend.namespace()
    wide, shift = widen(xp, weight), None if bias is None else widen(xp, bias)

    def formula(x: Array) -> Array:
        return cast(xp, _product(backend, xp, widen(xp, x), wide, shift), x.dtype)  # (rows, out)

    y = backend.by_rows(formula, _rows(xp, x))
    return xp.reshape(y, (*x.shape[:-1], weight.shape[1])), Saved(x, weight, bias)


def backward(backend: Backend, dy: Array, saved: Saved, *, inputs: bool = True) -> LinearGrads:
    """Return dy Wᵀ (None unless ``inputs``), xᵀ dy and Σ dy, summed over every leading axis, in float32 at least."""
    xp, (x, weight, bias) = backend.namespace(), saved
    grads = backend.operation("linear_backward", dy, x, weight, bias, inputs=inputs)
    if grads is not None:
        return LinearGrads(*grads)
    x_rows, dy_rows, dbias = _rows(xp, widen(xp, x)), _rows(xp, widen(xp, dy)), None
    # y = x W + b
    if bias is not None:
        dbias = cast(xp, apply_linear(backend, lambda dy: xp.sum(dy, axis=0), dy_rows), bias.dtype)  # (out,)
    dweight = cast(xp, _product(backend, xp, xp.matrix_transpose(x_rows), dy_rows), weight.dtype)  # (in, out)
    if not inputs:
        return LinearGrads(None, dweight, dbias)
    dx = _product(backend, xp, dy_rows, xp.matrix_transpose(widen(xp, weight)))  # (rows, in)
    return LinearGrads(cast(xp, xp.reshape(dx, x.shape), x.dtype), dweight, dbias)


def _product(backend: Backend, xp: Any, a: Array, b: Array, shift: Array | None = None) -> Array:
    """Return a b + shift; where a sum overflows, it is computed again from factors that are scaled down.

    The second product costs as much as the first, so it is left out where the values cannot be read.
    """
    y = a @ b
    if shift is not None:
        y = y + shift
    if stands(backend, xp, y):
        return y
    less = shrink(y)
    product = xp.matmul(a * less, b * less) / less
    return xp.where(xp.isfinite(y), y, (product if shift is None else product + shift * less) / less)


def _rows(xp: Any, x: Array) -> Array:
    """(…, features) → (rows, features), for one matrix product instead of one for each entry of the batch."""
    return xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


OPERATION = Operation("linear", forward, backward)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Map the last axis affinely: y = x W + b.

    Parameters
    ----------
    x : array (…, in_features)
        Floating; float16 and bfloat16 are accumulated in float32.
    weight : array (in_features, out_features)
        Of the dtype of ``x``.
    bias : array (out_features,), optional

    Returns
    -------
    array (…, out_features)

    Raises
    ------
    ShapeError, DTypeError
        If the shapes do not fit, or the dtypes differ or are not floating.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.linear(np.ones((2, 3)), np.ones((3, 1)), np.array([0.5]))
    array([[3.5],
           [3.5]])
    """
    return run(OPERATION, _check(x, weight, bias))


def linear_forward(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, Cache]:
    """Return ``(linear(x, weight, bias), cache)``."""
    return run_with_cache(OPERATION, _check(x, weight, bias))


def linear_backward(dy: Array, cache: Cache) -> LinearGrads:
    """Return dx = dy Wᵀ, dW = xᵀ dy and db = Σ dy, summed over every leading axis."""
    return run_backward(OPERATION, dy, cache, LinearGrads)


def _check(x: Array, weight: Array, bias: Array | None) -> dict[str, Array | None]:
    if x is None or weight is None:
        expect_arrays(x=x, weight=weight)
    expect_one_dtype(x=x, weight=weight, bias=bias)
    expect_rank("x", x, 1)
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ShapeError(
            f"weight: expected ({x.shape[-1]}, out_features) to match x (…, {x.shape[-1]}), got {tuple(weight.shape)}"
        )
    if bias is not None:
        expect_shape("bias", bias, (weight.shape[1],))
    return {"x": x, "weight": weight, "bias": bias}
