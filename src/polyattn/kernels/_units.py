"""Scores near or beyond the range of their dtype: the test for overflow, and rows in units of 2^u.

Where a score may leave the range of its dtype, the queries of its row are divided by a power of two, 2^u with u ≥ 0,
so that every score of the row is finite. The row is then in units of 2^u: its scores, its bias, its sink and its
largest score are divided by it, and a difference of two scores is multiplied by it before the exponential. Division
by a power of two is exact: without overflow, the result is the same to the last bit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._arrays import Array, cast, dtype_name
from ._problem import Problem, RowStatistics
from ._static import constant

LARGE = constant(32.0)
"""Up to this score, the rounding of two computations of a score changes a weight by less than 1e-6 of itself."""
EXPONENT = {"float32": 128, "float64": 1024}
"""Numbers below 2 to this power are finite."""


class Units(NamedTuple):
    """2^u of each row, or of a whole array, as two factors: the power itself may be out of range."""

    one: Array  # (…, H, n_q, 1), or 0-d
    other: Array


def multiplied(x: Array, units: Units | None) -> Array:
    """Return ``x · 2^u``, infinite where it overflows."""
    return x if units is None else x * units.one * units.other


def divided(x: Array, units: Units | None) -> Array:
    """Return ``x / 2^u``."""
    return x if units is None else x / units.one / units.other


def fits(q: Array, k: Array, v: Array | None, problem: Problem) -> Array:
    """Return whether no value in a forward can overflow, as a 0-d boolean array. q, k and v are in at least float32.

    Also False if an input is not finite: to ignore such entries would need copies of the arrays.
    """
    xp, sizes = problem.xp, problem.sizes
    scores = bound(xp, q) * bound(xp, k) * (max(sizes.d_k, 1) * at_least_one(xp, problem.scale, q))
    result = xp.less(scores, 2.0 ** room_for_scores(scores, problem))
    if v is None:
        return result
    return xp.logical_and(result, xp.less(bound(xp, v) * max(sizes.n_k, 1), 2.0 ** (exponents(scores) - 2)))


def is_moderate(
    q: Array, k: Array, v: Array, statistics: RowStatistics, problem: Problem, dout: Array | None = None
) -> Array:
    """Return whether a backward may use statistics from another computation of the scores: a 0-d boolean array.

    True if the rounding of all scores is negligible and no value can overflow. The arrays are in at least float32.
    Entries that are not finite are ignored, because no other computation would change their effect.
    """
    xp, sizes = problem.xp, problem.sizes
    q, k, v = (only_finite(xp, x) for x in (q, k, v))
    q_square, k_square = (xp.max(xp.sum(x * x, axis=-1)) for x in (q, k))
    scores = xp.sqrt(q_square) * xp.sqrt(k_square) * abs(problem.scale)  # by the Cauchy–Schwarz inequality
    result = xp.logical_and(xp.less_equal(scores, LARGE()), fits(q, k, v, problem))
    result = xp.logical_and(result, xp.less_equal(magnitude(xp, statistics.largest), LARGE()))
    if dout is None:
        return result
    products = magnitude(xp, dout) * magnitude(xp, v) * max(sizes.d_v, 1)
    return xp.logical_and(result, xp.less(products, 2.0 ** (exponents(products) - 8)))


def row_units(q: Array, k: Array, problem: Problem) -> Units:
    """Return units in which no score of a row overflows; 1 where no units are needed. q, k in at least float32."""
    xp = problem.xp
    exponent = log2_magnitude(problem, q, -1) + log2_magnitude(problem, k, None)  # (…, H, n_q, 1)
    exponent = exponent + (math.log2(max(problem.sizes.d_k, 1)) + log2(xp, at_least_one(xp, problem.scale, q)))
    return units_beyond(exponent - room_for_scores(exponent, problem), problem)


def value_unit(v: Array, problem: Problem) -> Units:
    """Return a power of two: no sum over the keys of v divided by it overflows. 1 if v needs no division."""
    exponent = log2_magnitude(problem, v, None) + math.log2(max(problem.sizes.n_k, 1))
    return units_beyond(exponent - (exponents(exponent) - 2), problem)


def gradient_unit(dout: Array, v: Array, problem: Problem) -> Units:
    """Return a power of two: no product of the values with dout divided by it overflows."""
    exponent = log2_magnitude(problem, dout, None) + log2_magnitude(problem, v, None)
    exponent = exponent + math.log2(max(problem.sizes.d_v, 1))
    return units_beyond(exponent - (exponents(exponent) - 8), problem)


def room_for_scores(x: Array, problem: Problem) -> int:
    """Return the exponent of the power of two that bounds scores; a bias at the end of the range needs more room."""
    return exponents(x) - (2 if problem.bias is None else 28)


def exponents(x: Array) -> int:
    """Return the exponent of the power of two that bounds finite numbers of the dtype of ``x``."""
    return EXPONENT[dtype_name(x.dtype)]


def only_finite(xp: Any, x: Array) -> Array:
    """Return ``x`` with 0 in place of entries that are not finite."""
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))


def bound(xp: Any, x: Array, axis: int | None = None) -> Array:
    """Return the largest absolute value, NaN if any is NaN, without a copy of the array. 0-d if axis is None."""
    if 0 in x.shape:
        return xp.sum(x, axis=axis, keepdims=axis is not None)
    where: dict[str, Any] = {"axis": axis, "keepdims": axis is not None}
    return xp.maximum(xp.max(x, **where), -xp.min(x, **where))


def magnitude(xp: Any, x: Array, axis: int | None = None) -> Array:
    """Return the largest finite absolute value, or 0 if no entry is finite. 0-d if axis is None."""
    if 0 in x.shape:
        return xp.sum(x, axis=axis, keepdims=axis is not None)
    return xp.max(xp.abs(only_finite(xp, x)), axis=axis, keepdims=axis is not None)


def log2_magnitude(problem: Problem, x: Array, axis: int | None) -> Array:
    """Return log2 of the largest finite absolute value, 0 where there is none or it is 0.

    What is computed from an entry that is not finite needs no unit, and for its sake other entries must not be divided.
    """
    xp, largest = problem.xp, bound(problem.xp, x, axis)
    if 0 in x.shape:
        return largest
    # The copies of a mask are made where they are needed only: x may be all keys of a cache.
    everywhere = xp.isfinite(xp.max(largest))  # across devices, only a maximum is communicated
    largest = problem.backend.cond(everywhere, lambda: largest, lambda: magnitude(xp, x, axis))
    return xp.log2(xp.where(xp.greater(largest, 0), largest, xp.ones_like(largest)))


def at_least_one(xp: Any, scale: Any, like: Array) -> Any:
    """Return max(|scale|, 1): a number, or for a traced scale an array with the dtype of ``like``."""
    if isinstance(scale, float | int):
        return max(abs(scale), 1.0)
    return cast(xp, xp.maximum(xp.abs(scale), xp.ones_like(scale)), like.dtype)


def log2(xp: Any, x: Any) -> Any:
    """Return the base-2 logarithm of a number or a traced number."""
    return math.log2(x) if isinstance(x, float | int) else xp.log2(x)


def units_beyond(exponent: Array, problem: Problem) -> Units:
    """Return 2^max(⌈exponent⌉, 0) as two factors."""
    xp, most = problem.xp, exponents(exponent) - 2
    whole = xp.clip(xp.ceil(exponent), 0.0, 2.0 * most)
    half = xp.floor(whole / 2)
    return Units(power_of_two(xp, half, most), power_of_two(xp, whole - half, most))


def power_of_two(xp: Any, i: Array, most: int) -> Array:
    """Return 2^i for integers 0 ≤ i ≤ most, exactly: the power function of some libraries is inexact."""
    result = one = xp.ones_like(i)
    for digit in (2**b for b in range(most.bit_length())):
        is_set = xp.equal(xp.remainder(xp.floor(i / digit), 2), 1)
        result = result * xp.where(is_set, xp.full_like(i, 2.0**digit), one)
    return result
