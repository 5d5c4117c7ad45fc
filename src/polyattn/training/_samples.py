"""The samples of a run: the pointer-copy task, or ``X`` and ``Y`` in the user's npz file."""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from ..errors import DTypeError, PolyattnError, ShapeError
from ._config import OptionError

__all__ = ["DataError", "Epochs", "Pairs", "PointerCopy", "digest", "expect_range", "load_npz"]

Pairs = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Inputs and targets, both (samples, sequence, width)."""

TRAINING, HELD_OUT, ORDER = range(3)  # the purposes of random streams

RATIOS = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: 1032}  # the bytes that one byte of a file can stand for, at most
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class DataError(PolyattnError, ValueError):
    """A data file that cannot be read, or that does not contain valid samples."""


@dataclass(frozen=True)
class PointerCopy:
    """Find the row with the largest first feature, and copy it to every position.

    Rows are standard normal numbers in float64, the same on every backend.
    """

    sequence: int
    width: int
    samples: int
    seed: int
    evaluated_on: str = "held-out samples"

    def batch(self, step: int) -> Pairs:
        """Return the samples of a step; a pure function, so that a resumed run continues exactly."""
        return self._draw(self.samples, TRAINING, step)

    def evaluation(self) -> Pairs:
        """Return 1024 samples that no step trains on."""
        return self._draw(1024, HELD_OUT, 0)

    def _draw(self, samples: int, stream: int, index: int) -> Pairs:
        x = _generator(self.seed, stream, index).standard_normal((samples, self.sequence, self.width))
        rows = x[np.arange(samples), np.argmax(x[:, :, 0], axis=1)]  # (samples, width)
        return x, np.broadcast_to(rows[:, None, :], x.shape)


@dataclass(frozen=True, eq=False)
class Epochs:
    """Samples in epochs, each shuffled differently; the last batch of an epoch may be smaller."""

    x: np.ndarray[Any, Any]  # (samples, sequence, width)
    y: np.ndarray[Any, Any]  # (samples, sequence, width)
    samples: int
    seed: int
    evaluated_on: str = "training samples"

    def batch(self, step: int) -> Pairs:
        """Return the samples of a step."""
        epoch, place = divmod(step, -(-len(self.x) // self.samples))
        chosen = _order(self.seed, epoch, len(self.x))[place * self.samples : (place + 1) * self.samples]
        return self.x[chosen], self.y[chosen]

    def evaluation(self) -> Pairs:
        """Return all samples of the file."""
        return self.x, self.y


def load_npz(path: str) -> Pairs:
    """Read ``X`` and ``Y``; raise DataError if the file or an array is not valid."""
    arrays = _read(path)
    for name, array in arrays.items():
        where = f"{path}: {name}"
        if array.dtype.kind != "f":
            raise DTypeError(f"{where}: expected floating numbers, got {array.dtype}; save {name}.astype('float32')")
        if array.ndim != 3:
            raise ShapeError(f"{where}: expected shape (samples, sequence, features), got {array.shape}")
        if 0 in array.shape:
            raise ShapeError(f"{where}: expected at least one sample, position and feature, got shape {array.shape}")
    x, y = arrays["X"], arrays["Y"]
    if y.shape != x.shape:
        raise ShapeError(f"{path}: Y: expected the shape of X, {x.shape}, got {y.shape}")
    for name, array in arrays.items():
        if (bad := np.argwhere(~np.isfinite(array))).size:
            raise DataError(f"{path}: {name}: expected finite numbers, got NaN or infinity in sample {bad[0][0]}")
    return x, y


def expect_range(pairs: Pairs, dtype: str) -> None:
    """Raise DTypeError if a number is too large for the dtype in which the run computes."""
    largest = np.finfo("float32" if dtype == "bfloat16" else dtype).max  # bfloat16 has the range of float32
    for name, array in zip("XY", pairs, strict=True):
        if np.abs(array).max() > largest:
            raise DTypeError(f"--data: {name} holds numbers too large for {dtype}; use --dtype float32 or float64")


def digest(pairs: Pairs) -> str:
    """Return a digest of the content of samples."""
    found = hashlib.sha256()
    for array in pairs:
        found.update(f"{array.dtype.str} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _read(path: str) -> dict[str, np.ndarray[Any, Any]]:
    if not Path(path).is_file():
        raise OptionError(f"--data: there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if missing := " and ".join(name for name in "XY" if name not in names):
                found = ", ".join(names) or "nothing"
                raise DataError(f"{path}: expected arrays X and Y, missing {missing}; the file has {found}")
            if len(set(names)) != len(names):
                raise ValueError("two of its arrays have one name")
            return {name: _array(archive, f"{name}.npy", os.path.getsize(path)) for name in "XY"}
    except (DataError, MemoryError):
        raise
    except Exception as cause:  # zipfile, zlib and NumPy's parser raise exceptions of every kind for damaged files
        raise DataError(
            f"{path}: not a readable npz file of numbers ({cause}); write it with numpy.savez(file, X=..., Y=...)"
        ) from cause


def _array(archive: zipfile.ZipFile, name: str, size: int) -> np.ndarray[Any, Any]:
    """Read an array from an archive of ``size`` bytes; raise before memory is taken for more than it can hold."""
    info = archive.getinfo(name)
    ratio = RATIOS.get(info.compress_type)
    if ratio is None or info.file_size > ratio * size:
        raise ValueError(f"{name} is not stored as NumPy stores it")
    with archive.open(info) as file:
        read_header = HEADERS.get(npy.read_magic(file))
        if read_header is None:
            raise ValueError(f"{name} is of another version of the format")
        shape, _, dtype = read_header(file)
        if file.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
            raise ValueError(f"{name} has {info.file_size} bytes, which {dtype} of shape {shape} has not")
    with archive.open(info) as file:
        array: np.ndarray[Any, Any] = npy.read_array(file, allow_pickle=False)
        return array


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, samples: int) -> np.ndarray[Any, Any]:
    return _generator(seed, ORDER, epoch).permutation(samples)


def _generator(seed: int, stream: int, index: int) -> np.random.Generator:
    """Return the random generator for one purpose and one step or epoch."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, index))))
