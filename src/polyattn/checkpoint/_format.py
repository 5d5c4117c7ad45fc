"""The format of safetensors files and their indices, and its validation.

The safetensors library writes our files. It does not read them, because it returns neither bfloat16 NumPy arrays nor
views of a memory map, and ``deserialize`` copies the whole file. A test compares the accepted headers with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import numpy as np

from ..errors import CheckpointError

__all__ = ["DIGEST", "DTYPES", "LARGEST", "Entry", "array_of", "damaged", "digest", "json_object", "read_header"]

DIGEST = "polyattn.digest"
LARGEST = 100_000_000  # bytes of a header, as in the safetensors library
MOST_AXES = 64  # of NumPy

DTYPES = {  # the name of each dtype in NumPy, and the bytes of an element
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1), "U16": ("uint16", 2), "U32": ("uint32", 4), "U64": ("uint64", 8),
    "I8": ("int8", 1), "I16": ("int16", 2), "I32": ("int32", 4), "I64": ("int64", 8),
    "F16": ("float16", 2), "F32": ("float32", 4), "F64": ("float64", 8), "C64": ("complex64", 8),
    "BF16": ("bfloat16", 2), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
}  # fmt: skip
OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # ml_dtypes need not be installed for the others


class Entry(NamedTuple):
    """The dtype and shape of a tensor, and its first and last byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def damaged(where: str, cause: object) -> CheckpointError:
    """Return the error for a file that is damaged or not a safetensors file."""
    return CheckpointError(
        f"{where}: not a safetensors file, or a damaged one ({cause}); use an undamaged copy, or write a new one"
    )


def read_header(file: IO[bytes], size: int, where: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the tensors of a file of ``size`` bytes by name, and its metadata.

    Raises
    ------
    CheckpointError
        If the header is not valid, or does not agree with the size of the file.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    try:
        if len(prefix) < 8 or length > size - 8:
            raise ValueError("it ends within its header")
        if length > LARGEST:
            raise ValueError(f"a header of {length} bytes is larger than the limit of {LARGEST}")
        header = json_object(file.read(length))
        metadata = header.pop("__metadata__", {})
        if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
            raise ValueError("its metadata are not strings by name")
        "".join(metadata.values()).encode()
        for name, found in header.items():
            if isinstance(found, dict) and isinstance(code := found.get("dtype"), str) and code not in DTYPES:
                raise CheckpointError(f"{where}: {name!r} has the dtype {code}; expected one of {', '.join(DTYPES)}")
        entries = {name: _entry(name, found, 8 + length) for name, found in header.items()}
        _expect_no_holes(entries, 8 + length, size)
    except CheckpointError:
        raise
    except ValueError as cause:
        raise damaged(where, cause) from cause
    return entries, metadata


def json_object(data: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8; raise ValueError if it is not valid, or ambiguous because of a repeated name."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for name, _ in pairs:
            name.encode()  # raises for an unpaired surrogate
        if len(found := dict(pairs)) != len(pairs):
            raise ValueError("a name occurs in it twice")
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def array_of(entry: Entry, buffer: Any, offset: int, what: str) -> np.ndarray[Any, Any]:
    """Return an array on the memory of a buffer; writable if the buffer is."""
    dtype = _dtype(entry.dtype, what).newbyteorder("<")
    try:
        x: np.ndarray[Any, Any] = np.ndarray(entry.shape, dtype, buffer, offset)
    except (ValueError, OverflowError, TypeError) as cause:  # too long an axis next to one of 0; a shorter file
        raise damaged(what, cause) from cause
    if entry.dtype == "bool" and x.size and x.view(np.uint8).max() > 1:
        raise damaged(what, "a boolean is neither 0 nor 1")
    return x


def digest(tensors: Mapping[str, np.ndarray[Any, Any]], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of names, dtypes, shapes, elements and metadata, independent of their order."""
    result = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        result.update(f"{name} {x.dtype.name} {x.shape}".encode())
        result.update(x.reshape(-1).view(np.uint8).data)  # as bytes: arrays of ml_dtypes have no buffer protocol
    return result.hexdigest()


def _entry(name: str, found: Any, base: int) -> Entry:
    try:
        (dtype, itemsize), (start, stop), shape = DTYPES[found["dtype"]], found["data_offsets"], found["shape"]
        if not isinstance(shape, list):  # an empty text or object has no axes either
            raise TypeError
        numbers = [*shape, start, stop]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name!r} lacks a dtype, a shape or its two offsets") from None
    if len(numbers) > MOST_AXES + 2 or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{name!r} has an invalid shape or invalid offsets")
    if stop - start != math.prod(shape) * itemsize:
        raise ValueError(f"{name!r} of {dtype} and shape {tuple(shape)} cannot have {stop - start} bytes")
    return Entry(dtype, tuple(shape), base + start, base + stop)


def _expect_no_holes(entries: Mapping[str, Entry], base: int, size: int) -> None:
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
        if entry.start != end:
            raise ValueError(f"{name!r} does not begin where the tensor before it ends")
        end = entry.stop
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, and it has {size} bytes")


def _dtype(name: str, what: str) -> np.dtype[Any]:
    if name not in OF_ML_DTYPES:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as cause:
        raise CheckpointError(
            f"{what} is {name}, which NumPy reads only with ml_dtypes: pip install ml_dtypes"
        ) from cause
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype
