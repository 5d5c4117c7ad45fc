"""Learnt biases by relative position, in buckets that are wider at larger distances, as in T5."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ShapeError
from ._arrays import Array, cast, unbroadcast, widen
from ._masks import as_int32
from ._problem import Problem, Sizes
from ._static import concrete, constant_result
from ._structure import StructuredBias


@dataclass(frozen=True)
class RelativePositionBias(StructuredBias):
    """table[bucket(position of the key − position of the query)], with one column of the table for each head."""

    num_buckets: int
    bidirectional: bool
    max_distance: int
    table: Array | None = field(default=None, compare=False, repr=False)  # (buckets, H)

    def without_table(self) -> RelativePositionBias:
        """Return the bias without its table: its static fields."""
        return replace(self, table=None)

    def expect_fit(self, sizes: Sizes) -> None:
        """Require one row for each bucket and one column for each head."""
        shape = None if self.table is None else tuple(self.table.shape)
        if shape != (self.num_buckets, sizes.heads):
            raise ShapeError(
                f"bias: expected a table ({self.num_buckets} buckets, {sizes.heads} heads of the queries), got {shape}"
            )

    def pairs(self, problem: Problem) -> Array:
        """Take the value of each distance from the table, and place it along its diagonal."""
        return self._spread(problem, problem.table)

    def allowed(self, problem: Problem) -> Array | None:
        """Return False where the table is −inf."""
        return self._spread(problem, problem.xp.not_equal(problem.table, -math.inf))

    def gradient(self, dscores: Array, problem: Problem) -> Array:
        """Sum over each diagonal, then over the distances of each bucket: the backward of ``pairs``."""
        return self.table_gradient(diagonal_sums(problem.xp, dscores), problem)

    def table_gradient(self, values: Array, problem: Problem) -> Array:
        """Return the gradient of the table from that of each distance, (…, H, distances)."""
        xp, heads = problem.xp, problem.sizes.heads
        buckets = self._buckets(problem)  # (…, distances)
        values = unbroadcast(xp, values, (*buckets.shape[:-1], *values.shape[-2:]))
        values = xp.reshape(xp.matrix_transpose(values), (math.prod(buckets.shape), heads))
        zeros = xp.zeros((self.num_buckets, heads), dtype=values.dtype, device=problem.native_device)
        index = xp.reshape(buckets, (math.prod(buckets.shape),))
        dtable = problem.backend.index_add(zeros, index, values)  # (buckets, H)
        return dtable if problem.table is None else cast(xp, dtable, problem.table.dtype)

    def by_distance(self, problem: Problem) -> Array:
        """Return the bias of each distance, from that of the last query and first key upwards: (…, H, distances)."""
        return self._by_distance(problem, problem.table)

    def _by_distance(self, problem: Problem, table: Any) -> Array:
        xp, buckets = problem.xp, self._buckets(problem)  # (…, distances)
        values = xp.take(table, xp.reshape(buckets, (math.prod(buckets.shape),)), axis=0)
        return xp.matrix_transpose(xp.reshape(values, (*buckets.shape, table.shape[1])))

    def _spread(self, problem: Problem, table: Any) -> Array:
        """Return table[bucket] of every pair, ``(…, H, n_q, n_k)``."""
        values = self._by_distance(problem, table)
        return along_diagonals(problem.xp, values, problem.sizes.n_q, problem.sizes.n_k)

    def _buckets(self, problem: Problem) -> Array:
        """Return the bucket of each distance, from that of the last query and first key upwards."""
        xp, device = problem.xp, problem.native_device
        n_q, n_k = problem.sizes.n_q, problem.sizes.n_k
        steps = xp.arange(1 - n_q, n_k, dtype=xp.int32, device=device)
        distance = xp.subtract(steps, as_int32(problem, problem.q_offset)[..., None])  # (…, distances)
        side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        before = xp.negative(distance)
        away = xp.abs(distance) if self.bidirectional else xp.where(xp.less(before, 0), xp.zeros_like(before), before)
        starts = xp.asarray(bucket_starts(concrete(side), concrete(self.max_distance)), dtype=xp.int32, device=device)
        passed = cast(xp, xp.greater_equal(away[..., None], starts), xp.int32)  # (…, distances, side − 1)
        bucket = xp.sum(passed, axis=-1, dtype=xp.int32)
        if self.bidirectional:  # the second half is for keys after the query
            bucket = xp.where(xp.greater(distance, 0), xp.add(bucket, side), bucket)
        return bucket


@constant_result
def bucket_starts(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """Return the smallest distance of each bucket after the first, in exact integers: the same on every library.

    The first e buckets, half of them, hold one distance each. Of the S other buckets, bucket e + s starts at
    e · (max_distance / e)^(s / S), rounded up: the smallest n with n^S ≥ e^(S − s) · max_distance^s.
    """
    return _bucket_starts(num_buckets, max_distance)


@functools.lru_cache(maxsize=64)
def _bucket_starts(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    exact = num_buckets // 2
    wide = num_buckets - exact
    bounds = (exact ** (wide - s) * max_distance**s for s in range(1, wide))
    return (*range(1, exact + 1), *(bisect_left(range(max_distance + 1), x, key=lambda n: n**wide) for x in bounds))


def along_diagonals(xp: Any, x: Array, n_q: int, n_k: int) -> Array:
    """Return y (…, n_q, n_k) with y[i, j] = x[j − i + n_q − 1], by repeats of x and a reshape to rows one shorter."""
    lead, period = x.shape[:-1], n_q + n_k
    x = xp.concat([x, x[..., :1]], axis=-1)
    x = xp.reshape(xp.broadcast_to(x[..., None, :], (*lead, n_q, period)), (*lead, n_q * period))
    return xp.reshape(x[..., : n_q * (period - 1)], (*lead, n_q, period - 1))[..., n_q - 1 :]


def diagonal_sums(xp: Any, dy: Array) -> Array:
    """Return the sum of ``dy`` (…, n_q, n_k) over each diagonal j − i: the backward of :func:`along_diagonals`."""
    *lead, n_q, n_k = dy.shape
    period = n_q + n_k
    dy = xp.flip(widen(xp, dy), axis=-2)
    dy = xp.concat([dy, xp.broadcast_to(xp.zeros_like(dy[..., :1]), (*lead, n_q, n_q))], axis=-1)
    dy = xp.reshape(dy, (*lead, n_q * period))[..., : n_q * (period - 1)]
    return xp.sum(xp.reshape(dy, (*lead, n_q, period - 1)), axis=-2)
