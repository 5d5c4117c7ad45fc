"""Rotary angles, exact to the dtype's rounding at large positions."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..backend import Array, dtype_name
from ..kernels import cast
from ..kernels._static import constant, constant_result

__all__ = ["consecutive", "rotary_angles", "signed"]

TAU = constant(math.tau)
DIGIT = 2**12
"""Positions and frequencies are multiplied in parts of 12 bits: float32 holds the products exactly."""


def rotary_angles(xp: Any, positions: Array, frequencies: bytes, dtype: Any, device: Any) -> Array:
    """Return position · frequency in radians, reduced to [−π, π], as ``(…, n, dim / 2)``.

    The reduction is exact at positions below 2²⁴, where a product in float32 would have an error of about one radian.
    Position and frequency, in revolutions, are split into digits of 12 bits, and whole revolutions are subtracted from
    each product of digits before the products are summed.
    """
    revolutions = 0
    for digit, parts in zip((positions % DIGIT, positions // DIGIT), digits(frequencies), strict=True):
        digit = cast(xp, digit, dtype)[..., None]
        for part in parts:
            product = digit * xp.asarray(part, dtype=dtype, device=device)
            revolutions = revolutions + (product - xp.round(product))
        revolutions = revolutions - xp.round(revolutions)
    return TAU() * revolutions


@constant_result
def digits(frequencies: bytes) -> tuple[list[list[float]], list[list[float]]]:
    """Return the frequencies in revolutions, for one position and for DIGIT positions, each as a sum of three parts.

    The first two parts have 12 bits each, the third has the rest.
    """
    return _digits(frequencies)


@functools.lru_cache(maxsize=64)
def _digits(frequencies: bytes) -> tuple[list[list[float]], list[list[float]]]:
    def split(rest: NDArray[np.float64]) -> list[list[float]]:
        first = np.floor(rest * DIGIT) / DIGIT
        second = np.floor((rest - first) * DIGIT**2) / DIGIT**2
        return [part.tolist() for part in (first, second, rest - first - second)]

    revolutions = np.frombuffer(frequencies) / math.tau
    return split(revolutions % 1), split(revolutions * DIGIT % 1)


def consecutive(xp: Any, n: int, start: int | Array, device: Any) -> Array:
    """Return start, start + 1, …: ``(n,)``, or ``(…, n)`` for starts ``(…)``."""
    if isinstance(start, int):
        return xp.arange(start, start + n, dtype=xp.int32, device=device)
    return start[..., None] + xp.arange(n, dtype=start.dtype, device=device)


def signed(xp: Any, x: Array) -> Array:
    """Return integers as int32 or int64: torch supports few operations on unsigned ones."""
    return cast(xp, x, xp.int64 if dtype_name(x.dtype).endswith("64") else xp.int32)
