"""How NumPy arrays lie in memory, for native functions that read them as rows."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from polyattn.backend import Array

from ._threads import thread_count

__all__ = [
    "BFLOAT16",
    "CODES",
    "Layout",
    "aligned",
    "is_matrix",
    "is_whole",
    "is_wide",
    "layout_of",
    "wide",
]

BFLOAT16 = np.dtype(np.int16)
"""The dtype of the bits of bfloat16 numbers, which NumPy has not."""
CODES = {np.dtype(np.float32): 0, np.dtype(np.float64): 1, np.dtype(np.float16): 2, BFLOAT16: 3}
"""``enum DType`` of cpp/abi.h."""
ALONE = 2**15  # elements below which a second thread is never worth asking for


class Layout(NamedTuple):
    """Arrays of one shape and dtype as rows of n contiguous elements."""

    dtype: int
    rows: int
    n: int
    steps: tuple[int, ...]
    """For each array, the distance between the first elements of neighbouring rows, in elements."""
    threads: int


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of sums and statistics: float32 for elements of 16 bits."""
    return dtype if dtype.itemsize > 2 else np.dtype(np.float32)


def layout_of(backend: str, axes: int, *arrays: Array) -> Layout | None:
    """Return how arrays lie in memory as rows of their last ``axes`` axes (0: of any length), or None.

    ``backend`` is the one whose number of threads applies.
    """
    first = arrays[0]
    dtype, shape, size = first.dtype, first.shape, first.size
    if dtype not in CODES or not shape or size == 0:
        return None
    contiguous = True
    for x in arrays:
        if type(x) is not np.ndarray or x.dtype != dtype or x.shape != shape or not x.flags.aligned:
            return None
        contiguous = contiguous and x.flags.c_contiguous
    threads = 1 if size < ALONE else thread_count(backend)
    if contiguous:
        n = math.prod(shape[len(shape) - axes :]) if axes else size
        return Layout(CODES[dtype], size // n, n, (n,) * len(arrays), threads)
    lead = len(shape) - max(axes, 1)
    n = math.prod(shape[lead:])
    steps = [_step(x, lead) for x in arrays]
    if None in steps:
        return None
    return Layout(CODES[dtype], size // n, n, tuple(steps), threads)  # type: ignore[arg-type]  # no step is None here


def _step(x: Array, lead: int) -> int | None:
    """Return the distance between neighbouring rows, the axes from ``lead`` on, in elements; None if it varies."""
    axes = [(size, stride) for size, stride in zip(x.shape, x.strides, strict=True)][::-1]
    row = [(size, stride) for size, stride in axes[: x.ndim - lead] if size != 1]
    rows = [(size, stride) for size, stride in axes[x.ndim - lead :] if size != 1]
    if (row and (row[0][1] != x.itemsize or not _regular(row))) or not _regular(rows):
        return None
    stride = rows[0][1] if rows else 0
    return None if stride % x.itemsize else stride // x.itemsize


def _regular(axes: list[tuple[int, int]]) -> bool:
    """Return whether axes, the last one first, are one axis with a constant stride."""
    return all(outer == size * stride for (size, stride), (_, outer) in itertools.pairwise(axes))


def aligned(x: Array | None) -> Array | None:
    """Return an array, or a copy if its elements are not aligned."""
    return x if x is None or x.flags.aligned else x.copy()


def is_whole(p: Array | None, dtype: np.dtype[Any], size: int) -> bool:
    """Return whether an array has that size and dtype, and no gaps, or is absent."""
    if p is None:
        return True
    flags = p.flags
    return type(p) is np.ndarray and p.size == size and p.dtype == dtype and flags.c_contiguous and flags.aligned


def is_matrix(x: Array, like: Array) -> bool:
    """Return whether an array is a matrix of float32 or float64 as another one, which the library can read."""
    readable = type(x) is np.ndarray and x.ndim == 2 and x.flags.aligned and x.dtype == like.dtype and is_wide(x)
    return readable and not any(step % x.itemsize for step in x.strides)


def is_wide(x: Array) -> bool:
    """Return whether an array is of float32 or float64."""
    return x.dtype in CODES and x.itemsize > 2
