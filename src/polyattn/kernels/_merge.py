"""Joining the results of attention over two disjoint sets of keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._arrays import Array


def merge(xp: Any, a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return ``(out, lse)`` over the union of two key sets: exact, and associative.

    ``out (…, n_q, d_v)`` and ``lse (…, n_q)`` in float32 at least. A part that attended to nothing,
    zeros and −inf, counts for nothing.
    """
    (out_a, lse_a), (out_b, lse_b) = a, b
    largest = xp.maximum(lse_a, lse_b)
    empty = xp.equal(largest, -math.inf)
    largest = xp.where(empty, xp.zeros_like(largest), largest)
    weight_a, weight_b = xp.exp(lse_a - largest), xp.exp(lse_b - largest)
    total = weight_a + weight_b
    total = xp.where(empty, xp.ones_like(total), total)  # log 0 is put in by hand, without its derivative
    lse = xp.where(empty, xp.full_like(total, -math.inf), largest + xp.log(total))
    out = out_a * (weight_a / total)[..., None] + out_b * (weight_b / total)[..., None]
    return out, lse


class Sums(NamedTuple):
    """The numerator and the denominator of rows over some of the keys, both divided by exp(largest)."""

    out: Array  # (…, n_q, d_v)
    total: Array  # (…, n_q, 1); 0 where there was nothing to attend to
    largest: Array  # (…, n_q, 1)


def merge_sums(xp: Any, a: Sums, b: Sums) -> Sums:
    """Return the sums over the union of two key sets.

    A log-sum-exp of large scores has no digits left for the sum; these have.
    """
    a, b = (
        part._replace(largest=xp.where(xp.equal(part.total, 0), xp.full_like(part.largest, -math.inf), part.largest))
        for part in (a, b)
    )
    largest = xp.maximum(a.largest, b.largest)
    none = xp.equal(largest, -math.inf)
    base = xp.where(none, xp.zeros_like(largest), largest)

    def rebased(part: Sums) -> tuple[Array, Array]:
        scale = xp.exp(part.largest - base)
        # Scores that are all −inf gave NaN; beside finite ones they have no weight.
        counts = xp.logical_or(none, xp.not_equal(part.largest, -math.inf))
        out, total = (xp.where(counts, x * scale, xp.zeros_like(x)) for x in (part.out, part.total))
        return out, total

    (out_a, total_a), (out_b, total_b) = rebased(a), rebased(b)
    return Sums(out_a + out_b, total_a + total_b, largest)
