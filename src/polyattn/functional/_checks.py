"""Checks of arguments, and the errors that they raise.

``is_…`` returns a bool. ``expect_…`` raises if an argument is invalid. ``checked_…`` raises too, and returns the
argument in the form in which it is used.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..backend import Array, dtype_name
from ..errors import BackendMismatchError, DTypeError, ShapeError
from ..kernels import FLOAT_DTYPES
from ..registry import looks_like_array


class ShapeDtype(NamedTuple):
    """The shape and dtype of an array, without its values."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


FLOATING = frozenset(FLOAT_DTYPES)


def is_floating(x: Array) -> bool:
    """Return whether an array has one of the supported real floating dtypes."""
    return dtype_name(x.dtype) in FLOAT_DTYPES


def is_integer(x: Array) -> bool:
    """Return whether an array holds integers; booleans do not count."""
    return dtype_name(x.dtype).removeprefix("u").startswith("int")


def expect_floating(**arrays: Array | None) -> None:
    """Require arrays of a real floating dtype."""
    for name, dtype in _dtypes(arrays).items():
        if dtype not in FLOATING:
            raise DTypeError(f"{name}: expected a floating dtype ({', '.join(FLOAT_DTYPES)}), got {dtype}")


def expect_dtype(dtype: str, owner: str, **arrays: Array | None) -> None:
    """Require floating arrays of the dtype of ``owner``, such as "the layer's", which the message names."""
    for name, found in _dtypes(arrays).items():
        if found != dtype:
            expect_floating(**{name: arrays[name]})
            raise DTypeError(f"{name}: expected {dtype}, {owner} dtype, got {found}")


def checked_dtype(dtype: Any) -> str:
    """Return the name of a supported floating dtype, or raise."""
    name = dtype if isinstance(dtype, str) else dtype_name(dtype)
    if name not in FLOAT_DTYPES:
        raise DTypeError(f"dtype: expected one of {', '.join(FLOAT_DTYPES)}, got {shown(dtype)}")
    return name


def expect_one_dtype(**arrays: Array | None) -> None:
    """Require floating arrays of the same dtype."""
    dtypes = _dtypes(arrays)
    found = set(dtypes.values())
    if not found <= FLOATING:
        expect_floating(**arrays)
    if len(found) > 1:
        raise DTypeError(f"expected one dtype, got {', '.join(f'{name} {dtype}' for name, dtype in dtypes.items())}")


def expect_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Require an exact shape."""
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")


def expect_rank(name: str, x: Array, rank: int) -> None:
    """Require at least ``rank`` axes."""
    if not hasattr(x, "ndim"):
        raise _no_array(name, x)
    if x.ndim < rank:
        least = "1 axis" if rank == 1 else f"{rank} axes"
        raise ShapeError(f"{name}: expected at least {least}, got shape {tuple(x.shape)}")


def expect_arrays(**arrays: Array) -> None:
    """Require arrays, of any library and dtype."""
    for name, x in arrays.items():
        if not looks_like_array(x):
            raise _no_array(name, x)


def is_number(x: Any) -> bool:
    """Return whether a static argument is a real number of Python or NumPy; booleans do not count."""
    return type(x) is float or (isinstance(x, numbers.Real) and not isinstance(x, bool))


def is_integer_number(x: Any) -> bool:
    """Return whether a static argument is an integer of Python or NumPy; booleans do not count."""
    return type(x) is int or (isinstance(x, numbers.Integral) and not isinstance(x, bool))


def shown(x: Any) -> str:
    """Return an invalid argument as an error message shows it: its repr if that is short, else its type."""
    text = repr(x)
    return text if len(text) <= 40 and "\n" not in text else type(x).__name__


def _dtypes(arrays: Mapping[str, Array | None]) -> dict[str, str]:
    """Return the dtype names of the arrays that are not None; raise BackendMismatchError if one is no array."""
    dtypes, last, found = {}, None, ""
    for name, x in arrays.items():
        if x is not None:
            try:
                dtype, _ = x.dtype, x.ndim
            except Exception:  # a property may raise anything
                raise _no_array(name, x) from None
            if dtype is not last:  # most calls have arrays of one dtype
                last, found = dtype, dtype_name(dtype)
            dtypes[name] = found
    return dtypes


def _no_array(name: str, x: object) -> BackendMismatchError:
    return BackendMismatchError(f"{name}: expected an array, got {type(x).__name__}")
