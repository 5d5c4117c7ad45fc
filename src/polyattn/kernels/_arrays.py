"""Small things that every formula needs of an array, by the standard alone."""

from __future__ import annotations

import functools
from typing import Any

from ._static import constant_result

Array = Any
"""An array of some library. The libraries share no base class, so none is named here."""

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")


@constant_result
def dtype_name(dtype: Any) -> str:
    """Return the standard's name of a dtype of any library, ``"float32"`` for instance."""
    return _dtype_name(dtype.__class__, dtype)


@functools.lru_cache(maxsize=256)  # NumPy spells the name anew each time, and every call asks for several
def _dtype_name(kind: Any, dtype: Any) -> str:
    # The kind keeps dtypes of two libraries from being compared, which some of them warn about.
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).rpartition(".")[2]
    return str(name)


def wide(xp: Any, dtype: Any) -> Any:
    """Return the dtype in which long sums over ``dtype`` are taken: float32 at least."""
    return dtype if dtype == xp.float64 else xp.float32


def cast(xp: Any, x: Array, dtype: Any) -> Array:
    """Return ``x`` in a dtype, itself where it has it."""
    return xp.astype(x, dtype, copy=False)


def widen(xp: Any, x: Array) -> Array:
    """Return ``x`` in float32 at least."""
    return x if x.dtype == xp.float32 or x.dtype == xp.float64 else xp.astype(x, xp.float32)


def expand(xp: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Return ``x`` broadcast to a shape, as an array of its own: a broadcast view is read-only in some libraries."""
    return x if tuple(x.shape) == shape else xp.asarray(xp.broadcast_to(x, shape), copy=True)


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which shapes broadcast, or raise ValueError: NumPy's own takes no traced lengths."""
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        for i, n in enumerate(shape, len(result) - len(shape)):
            if n != 1:
                if result[i] != 1 and result[i] != n:  # torch.compile: ``in`` misses symbolic lengths
                    raise ValueError(f"shapes {', '.join(map(str, shapes))} do not broadcast")
                result[i] = n
    return tuple(result)


def broadcasts(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Say whether a shape broadcasts to another one, whatever of the two torch.compile has made symbolic."""
    axes = zip(reversed(shape), reversed(other), strict=False)
    return len(shape) <= len(other) and all(n == 1 or n == m for n, m in axes)


def unbroadcast(xp: Any, x: Array, shape: tuple[int, ...]) -> Array:
    """Sum ``x`` over the axes along which an array of ``shape`` was broadcast: broadcasting, reversed."""
    extra = x.ndim - len(shape)
    axes = (*range(extra), *(i + extra for i, n in enumerate(shape) if n == 1 and x.shape[i + extra] != 1))
    return xp.reshape(xp.sum(x, axis=axes), shape) if axes else x
