"""The user's own samples: ``X`` and ``Y`` of an npz file."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import DTypeError, PolyattnError, ShapeError
from ._config import OptionError
from ._task import ORDER, Pairs, generator

__all__ = ["DataError", "Epochs", "Samples", "load_npz"]


class DataError(PolyattnError, ValueError):
    """A data file that cannot be read, or holds something else than samples."""


class Samples(NamedTuple):
    """``X`` and ``Y``, both ``(samples, sequence, width)``, and a digest of their content."""

    x: np.ndarray[Any, Any]
    y: np.ndarray[Any, Any]
    digest: str

    def check_range(self, dtype: str) -> None:
        """Raise DTypeError if a number is too large for the dtype in which the run computes."""
        largest = np.finfo("float32" if dtype == "bfloat16" else dtype).max  # bfloat16 reaches as far as float32
        for name, array in (("X", self.x), ("Y", self.y)):
            if np.abs(array).max() > largest:
                raise DTypeError(f"--data: {name} holds numbers too large for {dtype}; use --dtype float32 or float64")


@dataclass(frozen=True, eq=False)
class Epochs:
    """Samples in epochs, each in an order of its own; the last batch of an epoch may be smaller."""

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


def load_npz(path: str) -> Samples:
    """Read and check ``X`` and ``Y``, both ``(samples, sequence, features)``.

    Raises
    ------
    OptionError
        If there is no such file.
    DataError, ShapeError, DTypeError
        If it is damaged or no npz file, lacks an array, or holds samples that cannot be trained on.
    """
    arrays = _read(path)
    x, y = arrays["X"], arrays["Y"]
    for name, array in arrays.items():
        where = f"{path}: {name}"
        if array.dtype.kind != "f":
            raise DTypeError(f"{where}: expected floating numbers, got {array.dtype}; save {name}.astype('float32')")
        if array.ndim != 3:
            raise ShapeError(f"{where}: expected shape (samples, sequence, features), got {array.shape}")
        if 0 in array.shape:
            raise ShapeError(f"{where}: expected at least one sample, position and feature, got shape {array.shape}")
    if y.shape != x.shape:
        raise ShapeError(f"{path}: Y: expected the shape of X, {x.shape}, got {y.shape}")
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {name}: expected finite numbers, got NaN or infinity in {_first_bad(array)}")
    digest = hashlib.sha256()
    for array in (x, y):
        digest.update(f"{array.dtype.str} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return Samples(x, y, digest.hexdigest())


def _read(path: str) -> dict[str, np.ndarray[Any, Any]]:
    if not Path(path).is_file():
        raise OptionError(f"--data: there is no file {path}")
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(path):  # a single array, a text: what np.load says of these leads astray
                raise ValueError("it is no archive of arrays, or a truncated one")
            archive = np.load(file, allow_pickle=False)
            missing = [name for name in ("X", "Y") if name not in archive]
            if missing:
                found = ", ".join(archive.files) or "nothing"
                raise DataError(
                    f"{path}: expected arrays X and Y, missing {' and '.join(missing)}; the file has {found}"
                )
            return {name: archive[name] for name in ("X", "Y")}
    except DataError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as cause:
        raise DataError(
            f"{path}: not a readable npz file of numbers ({cause}); write it with numpy.savez(file, X=..., Y=...)"
        ) from cause


def _first_bad(array: np.ndarray[Any, Any]) -> str:
    return f"sample {int(np.argwhere(~np.isfinite(array))[0][0])}"


@lru_cache(maxsize=1)
def _order(seed: int, epoch: int, samples: int) -> np.ndarray[Any, Any]:
    return generator(seed, ORDER, epoch).permutation(samples)
