"""Small array functions for all formulas; they use only the array API standard."""

from __future__ import annotations

import functools
from typing import Any

from ._static import constant_result

Array = Any
"""An array of any library. The type is ``Any``, because the libraries share no base class."""

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


@constant_result
def dtype_name(dtype: Any) -> str:
    """Return the standard's name of a dtype of any library, ``"float32"`` for instance."""
    return _dtype_name(dtype.__class__, dtype)


@functools.lru_cache(maxsize=256)  # NumPy builds the name at each access, and every call reads several
def _dtype_name(kind: Any, dtype: Any) -> str:
    # With the kind in the key, dtypes of two libraries are never compared; some libraries warn about that.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    return str(name)


def wide(xp: Any, dtype: Any) -> Any:
    """Return the dtype for long sums of ``dtype`` values: at least float32."""
    if dtype == xp.float32 or dtype == xp.float64:
        return dtype
    return xp.float64 if dtype_name(dtype) == "float64" else xp.float32  # NumPy's float64 in another byte order


def cast(xp: Any, x: Array, dtype: Any) -> Array:
    """Return ``x`` in a dtype; without a copy if it already has that dtype."""
    return xp.astype(x, dtype, copy=False)


def widen(xp: Any, x: Array) -> Array:
    """Return ``x`` in at least float32."""
    return x if x.dtype == xp.float32 or x.dtype == xp.float64 else xp.astype(x, wide(xp, x.dtype))


def expand(xp: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Return ``x`` broadcast to a shape, as a copy: a broadcast view is read-only in some libraries."""
    return x if tuple(x.shape) == shape else xp.asarray(xp.broadcast_to(x, shape), copy=True)


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the broadcast shape, or raise ValueError. NumPy's function does not accept traced lengths."""
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, n in enumerate(shape, len(result) - len(shape)):
            if n != 1:
                if result[i] != 1 and result[i] != n:  # not ``in``: symbolic lengths in torch.compile
                    raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
                result[i] = n
    return tuple(result)


def broadcasts(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether a shape broadcasts to another one; both may have symbolic lengths of torch.compile."""
    axes = zip(reversed(shape), reversed(other), strict=False)
    return len(shape) <= len(other) and all(n == 1 or n == m for n, m in axes)


def unbroadcast(xp: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Sum ``x`` over the axes along which an array of ``shape`` was broadcast: the backward of broadcasting."""
    extra = x.ndim - len(shape)
    axes = (*range(extra), *(i + extra for i, n in enumerate(shape) if n == 1 and x.shape[i + extra] != 1))
    return xp.reshape(xp.sum(x, axis=axes), shape) if axes else x
