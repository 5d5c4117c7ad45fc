"""NumPy arrays and CPU tensors of torch as the library sees them: an address, and strides in elements."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from polyattn.backend import Array, dtype_name

from ._structures import BATCH_AXES
from ._structures import Array as View

__all__ = [
    "AXES",
    "CODES",
    "NAMES",
    "address_of",
    "batch_strides",
    "code_of",
    "empty",
    "empty_as",
    "fill",
    "lay_out",
    "memory_of",
    "pointers",
    "readable",
    "strides_of",
    "zeros",
]

CODES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3}
"""``enum DType`` of cpp/abi.h."""
NAMES = {0: "float32", 1: "float64"}
DTYPES = {name: np.dtype(name) for name in NAMES.values()}
memory_of: Callable[[Array], Any] = (ctypes.c_char * 0).from_buffer
"""Returns the memory of a writable and contiguous NumPy array, such as a new one, as an argument of a function."""
AXES = ("head", "row", "feature")


def address_of(x: Array | None) -> int | None:
    """Return the address of the first element, or None without an array."""
    if not isinstance(x, np.ndarray):
        return None if x is None else int(x.data_ptr())
    try:
        return ctypes.addressof(memory_of(x))
    except (TypeError, ValueError, BufferError):  # read-only or not contiguous: five times slower
        return int(x.ctypes.data)


def pointers(*arrays: Array) -> list[Any]:
    """Return the addresses of arrays of one library as arguments of a function."""
    if not isinstance(arrays[0], np.ndarray):
        return [x.data_ptr() for x in arrays]
    try:
        return [memory_of(x) for x in arrays]
    except (TypeError, ValueError, BufferError):  # as above
        return [x.ctypes.data for x in arrays]


def strides_of(x: Array) -> tuple[int, ...]:
    """Return the strides in elements."""
    if isinstance(x, np.ndarray):
        size = x.itemsize
        return tuple([step // size for step in x.strides])
    return x.stride()  # type: ignore[no-any-return]  # torch is Any to the type checker


def code_of(x: Array) -> int:
    """Return the code of a dtype of floating-point numbers."""
    return CODES[dtype_name(x.dtype)]


def readable(x: Array) -> Array:
    """Return the array, or a copy if it is misaligned or in another byte order, or if its negation is lazy."""
    if isinstance(x, np.ndarray):
        if x.flags.aligned and x.dtype.isnative:
            return x
        return np.array(x, dtype=x.dtype.newbyteorder("="))
    if isinstance(x, np.generic):
        return np.asarray(x)
    return x.resolve_neg() if x.is_neg() else x


def empty(like: Array, shape: tuple[int, ...], dtype: str | None = None) -> Array:
    """Return an uninitialised array of the library of ``like``, in its dtype or another one."""
    if isinstance(like, np.ndarray):
        return np.empty(shape, like.dtype if dtype is None else DTYPES[dtype])
    # Lengths as arguments of their own: torch needs half as long to read them as to read a tuple.
    return like.new_empty(*shape) if dtype is None else like.new_empty(*shape, dtype=_torch_dtype(dtype))


def empty_as(like: Array, shape: tuple[int, ...]) -> Array:
    """Return an uninitialised array with the dtype of ``like`` and the order of its axes in memory.

    So heads that are a view of the features of each token can be joined again without a copy.
    """
    if isinstance(like, np.ndarray):
        kept = len(shape) == like.ndim and not like.flags.c_contiguous
        return np.empty_like(like, shape=shape, subok=False) if kept else np.empty(shape, like.dtype)
    if len(shape) != like.ndim or like.is_contiguous():
        return like.new_empty(*shape)  # as above
    import torch

    order = sorted(range(len(shape)), key=like.stride().__getitem__, reverse=True)
    return torch.empty_permuted(shape, order, dtype=like.dtype, device=like.device)


def zeros(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Return zeros of the library of ``like``."""
    return np.zeros(shape, dtype) if isinstance(like, np.ndarray) else like.new_zeros(shape, dtype=_torch_dtype(dtype))


def fill(view: View, x: Array, kept: tuple[int, ...], axes: tuple[str, ...] = AXES) -> None:
    """Describe an array (batch…, axes…), of which any leading axis may be missing; broadcast axes get stride 0.

    ``kept`` are the batch axes that the call has, as negative indices into the batch.
    """
    view.data = address_of(x)
    lay_out(view, x.shape, strides_of(x), kept, axes)


def lay_out(
    view: View, shape: tuple[int, ...], strides: tuple[int, ...], kept: tuple[int, ...], axes: tuple[str, ...] = AXES
) -> None:
    """Set the strides of an array of this shape."""
    for name in reversed(axes):
        if shape:
            setattr(view, name, strides[-1] if shape[-1] != 1 else 0)
            shape, strides = shape[:-1], strides[:-1]
    if shape:
        view.batch[:] = batch_strides(shape, strides, kept)


def batch_strides(shape: tuple[int, ...], strides: tuple[int, ...], kept: tuple[int, ...]) -> list[int]:
    """Return the strides of the batch axes of an array, of which leading ones may be missing."""
    found = [strides[axis] if -axis <= len(shape) and shape[axis] != 1 else 0 for axis in kept]
    return [0] * (BATCH_AXES - len(found)) + found


@functools.cache
def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)
