"""By what a position turns, without losing a digit at far positions."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backend import Array, dtype_name
from ..kernels import cast

__all__ = ["counted", "signed", "turns"]

DIGIT = 2**12
"""Positions and turns are multiplied 12 bits by 12 bits: float32 holds the products exactly."""


def turns(xp: Any, positions: Array, frequencies: tuple[float, ...], dtype: Any, device: Any) -> Array:
    """Return position · frequency in turns, less the whole ones, (…, n, dim / 2).

    No digit is lost at positions below 2²⁴, where a product in float32 would be wrong by a radian: position and
    turns are cut into digits, and whole turns are dropped from each product before the sum.
    """
    total = 0
    for digit, parts in zip((positions % DIGIT, positions // DIGIT), digits(frequencies), strict=True):
        digit = cast(xp, digit, dtype)[..., None]
        for part in parts:
            product = digit * xp.asarray(part, dtype=dtype, device=device)
            total = total + (product - xp.round(product))
        total = total - xp.round(total)
    return total


def digits(frequencies: tuple[float, ...]) -> tuple[list[list[float]], list[list[float]]]:
    """Return :func:`_digits`; torch.compile asks this function once, and would look into that one."""
    return _digits(frequencies)


@functools.lru_cache(maxsize=64)
def _digits(frequencies: tuple[float, ...]) -> tuple[list[list[float]], list[list[float]]]:
    """Return the turns of one position, and those of DIGIT positions, as sums: 12 bits, 12 bits and the rest."""

    def cut(rest: NDArray[np.float64]) -> list[list[float]]:
        first = np.floor(rest * DIGIT) / DIGIT
        second = np.floor((rest - first) * DIGIT**2) / DIGIT**2
        return [part.tolist() for part in (first, second, rest - first - second)]

    of_one = np.asarray(frequencies) / math.tau
    return cut(of_one % 1), cut(of_one * DIGIT % 1)


def counted(xp: Any, n: int, start: int | Array, device: Any) -> Array:
    """Return start, start + 1, …: ``(n,)``, or ``(…, n)`` for starts ``(…)``."""
    if isinstance(start, int):
        return xp.arange(start, start + n, dtype=xp.int32, device=device)
    return start[..., None] + xp.arange(n, dtype=start.dtype, device=device)


def signed(xp: Any, x: Array) -> Array:
    """Return integers as int32 or int64: torch hardly computes with unsigned ones."""
    return cast(xp, x, xp.int64 if dtype_name(x.dtype).endswith("64") else xp.int32)
