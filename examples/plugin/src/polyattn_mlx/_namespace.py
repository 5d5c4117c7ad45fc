"""mlx.core with the signatures of the array API standard. Names that are not defined here are those of mlx.core."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx


def __getattr__(name: str) -> Any:
    return getattr(mx, name)


def _placed(function: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Accept the standard's ``device=``: in MLX computations have a device, memory has none."""

    @functools.wraps(function)
    def create(*args: Any, device: None = None, **kwargs: Any) -> mx.array:
        return function(*args, **kwargs)

    return create


bool = mx.bool_
arange, eye, linspace = map(_placed, (mx.arange, mx.eye, mx.linspace))
full, ones, zeros = map(_placed, (mx.full, mx.ones, mx.zeros))
full_like, ones_like, zeros_like = map(_placed, (mx.full_like, mx.ones_like, mx.zeros_like))
asarray = _placed(mx.asarray)


def empty(shape: Any, *, dtype: Any = mx.float32, device: None = None) -> mx.array:
    """Return zeros, since MLX has no uninitialised arrays."""
    return mx.zeros(shape, dtype=dtype)


def astype(x: mx.array, dtype: Any, /, *, copy: Any = True, device: None = None) -> mx.array:
    """Convert; arrays are immutable, so the array itself can stand for a copy."""
    return x.astype(dtype)


def sum(x: mx.array, /, *, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> mx.array:
    """Sum, in a given dtype. The sum over no elements is zero; MLX 0.32 reads memory outside the array for it."""
    x = x if dtype is None else x.astype(dtype)
    if x.size:
        return mx.sum(x, axis=axis, keepdims=keepdims)
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    summed = {a % x.ndim for a in axes}
    kept = [1 if i in summed else n for i, n in enumerate(x.shape) if keepdims or i not in summed]
    return mx.zeros(kept, dtype=mx.int32 if x.dtype == mx.bool_ else x.dtype)


def argmax(x: mx.array, /, *, axis: int | None = None, keepdims: Any = False) -> mx.array:
    """Return signed indices, as the other libraries do."""
    return mx.argmax(x, axis=axis, keepdims=keepdims).astype(mx.int32)


def clip(x: mx.array, /, min: Any = None, max: Any = None) -> mx.array:
    """Clip with the argument names of the standard; either limit may be None."""
    return x if min is None and max is None else mx.clip(x, min, max)


def exp(x: mx.array, /) -> mx.array:
    """Return eˣ, in float64 as a power, since MLX's exp has only float32's precision there."""
    return mx.power(math.e, x) if x.dtype == mx.float64 else mx.exp(x)


def sin(x: mx.array, /) -> mx.array:
    """Return the sine, in float64 from the tangent of half the angle, for the same reason."""
    if x.dtype != mx.float64:
        return mx.sin(x)
    t = mx.tan(mx.multiply(x, 0.5))
    return mx.divide(mx.multiply(t, 2.0), mx.add(mx.square(t), 1.0))


def cos(x: mx.array, /) -> mx.array:
    """Return the cosine, in float64 from the tangent of half the angle, for the same reason."""
    if x.dtype != mx.float64:
        return mx.cos(x)
    squared = mx.square(mx.tan(mx.multiply(x, 0.5)))
    return mx.divide(mx.subtract(1.0, squared), mx.add(1.0, squared))
