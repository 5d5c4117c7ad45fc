"""Merging the results of attention over two disjoint sets of keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._arrays import Array
from ._problem import RowStatistics
from ._units import Units, multiplied


class Sums(NamedTuple):
    """The numerator and the denominator of the softmax over some of the keys, both divided by exp(largest)."""

    out: Array  # (…, n_q, d_v)
    total: Array  # (…, n_q, 1); 0 where no key is allowed
    largest: Array  # (…, n_q, 1), in the units of the row


def merge(
    xp: Any, a: tuple[Array, RowStatistics], b: tuple[Array, RowStatistics]
) -> tuple[Array, RowStatistics]:  # fmt: skip
    """Return out and the row statistics over the union of two key sets: exact, and associative.

    ``out (…, n_q, d_v)`` is in at least float32. A part without an allowed key does not change the row.
    """
    return finished(xp, merge_sums(xp, sums_of(xp, *a), sums_of(xp, *b)))


def sums_of(xp: Any, out: Array, statistics: RowStatistics) -> Sums:
    """Reverse :func:`finished`."""
    total = xp.exp(statistics.log_total)[..., None]
    return Sums(out * total, total, statistics.largest[..., None])


def finished(xp: Any, row: Sums, units: Units | None = None) -> tuple[Array, RowStatistics]:
    """Return out, which is numerator / denominator, and the row statistics; an empty row has out 0 and lse −inf."""
    empty = xp.equal(row.total, 0)
    total = xp.where(empty, xp.ones_like(row.total), row.total)  # log 0 is set below, without a derivative
    log_total = xp.where(empty, xp.full_like(total, -math.inf), xp.log(total))
    largest = xp.where(empty, xp.zeros_like(total), multiplied(row.largest, units))
    statistics = RowStatistics(*(xp.squeeze(x, axis=-1) for x in (largest, log_total)))
    return row.out / total, statistics


def merge_sums(xp: Any, a: Sums, b: Sums, units: Units | None = None) -> Sums:
    """Return the sums over the union of two key sets."""
    a, b = (
        part._replace(largest=xp.where(xp.equal(part.total, 0), xp.full_like(part.largest, -math.inf), part.largest))
        for part in (a, b)
    )
    largest = xp.maximum(a.largest, b.largest)
    none = xp.equal(largest, -math.inf)
    base = xp.where(none, xp.zeros_like(largest), largest)

    def rebased(part: Sums) -> tuple[Array, Array]:
        scale = xp.exp(multiplied(part.largest - base, units))
        # A part with only −inf scores has NaN sums; its weight is 0 if another score is finite.
        counts = xp.logical_or(none, xp.not_equal(part.largest, -math.inf))
        out, total = (xp.where(counts, x * scale, xp.zeros_like(x)) for x in (part.out, part.total))
        return out, total

    (out_a, total_a), (out_b, total_b) = rebased(a), rebased(b)
    return Sums(out_a + out_b, total_a + total_b, largest)


def statistics_of_lse(xp: Any, lse: Array) -> RowStatistics:
    """Return row statistics from a log-sum-exp; the digits that its rounding lost are not recovered."""
    empty = xp.equal(lse, -math.inf)
    zero = xp.zeros_like(lse)
    return RowStatistics(xp.where(empty, zero, lse), xp.where(empty, lse, zero))
