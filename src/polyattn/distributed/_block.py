"""One block of an attention problem, some of its queries with some of its keys, and how blocks are joined.

The results of blocks with the same queries and disjoint keys are merged exactly. The backward of a block needs, beside
its own arrays, only dout, out and the row statistics of the whole rows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from ..backend import Array
from ..functional._attention import empty_forward
from ..kernels import (
    AttentionGrads,
    Problem,
    RowStatistics,
    cast,
    choose,
    is_moderate,
    merge,
    reach,
    widen,
    with_statistics,
)
from ..kernels._masks import shifted
from ..kernels._plain import row_sum, sink_weights

__all__ = ["Rows", "Span", "backward", "block_of", "forward", "joined", "sinks_gradient", "without_keys"]


class Span(NamedTuple):
    """Adjacent positions of the whole problem."""

    start: int | Array
    length: int


class Rows(NamedTuple):
    """The result of some queries, in at least float32, and their row statistics."""

    out: Array  # (…, H, n_q, d_v)
    statistics: RowStatistics  # (…, H, n_q)


def block_of(
    problem: Problem, queries: Span, keys: Span, q_segments: Array | None = None, k_segments: Array | None = None
) -> Problem | None:
    """Return the problem of a block without sinks; None if static arguments exclude all of its pairs."""
    if 0 in (queries.length, keys.length):
        return None
    lengths = problem.key_lengths
    if lengths is not None:
        lengths = shifted(problem, lengths, plus=0, minus=keys.start)
        lengths = max(0, min(lengths, keys.length)) if isinstance(lengths, int) else lengths
    block = replace(
        problem,
        sizes=problem.sizes._replace(n_q=queries.length, n_k=keys.length),
        q_offset=shifted(problem, problem.q_offset, plus=queries.start, minus=keys.start),
        key_lengths=lengths,
        q_segments=q_segments,
        k_segments=k_segments,
        sinks=None,
    )
    if problem.dropout:
        block = replace(block, origin=(queries.start, keys.start), rows=problem.rows or problem.sizes.n_q)
    some, every = reach(block, 0, queries.length - 1, 0, keys.length - 1)
    if every:
        return replace(block, causal=False, window=(None, None), key_lengths=None)
    return block if some else None


def forward(q: Array, k: Array, v: Array, block: Problem) -> Rows:
    """Return the result over the keys of a block."""
    out, statistics = with_statistics(choose(block.backend.kernels, block), q, k, v, block)
    return Rows(widen(block.xp, out), statistics)


def without_keys(q: Array, v: Array, problem: Problem) -> Rows:
    """Return the result of queries over no keys: zeros, and the statistics of the sinks alone."""
    none = replace(problem, sizes=problem.sizes._replace(n_q=q.shape[-2], n_k=0))
    out, statistics = empty_forward(q, v[..., :0, :], v[..., :0, :], none)
    return Rows(widen(problem.xp, out), statistics)


def joined(problem: Problem, a: Rows | None, b: Rows) -> Rows:
    """Return the result over the keys of both; None has no keys."""
    return b if a is None else Rows(*merge(problem.xp, a, b))


def backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics, block: Problem,
    dlse: Array | None = None,
) -> AttentionGrads:  # fmt: skip
    """Return the gradients of a block; ``out``, ``statistics`` and ``dlse`` are those of the whole rows.

    Where scores are large, the kernel of a backward computes the row statistics again, and of the block's keys only.
    The gradient then goes through the merge, with c the share of the block in each row: out = Σ c · own_out over the
    blocks, and c = exp(own_lse − lse).
    """
    xp, kernel = block.xp, choose(block.backend.kernels, block)

    def of_whole_rows() -> AttentionGrads:
        return kernel.backward(dout, dlse, q, k, v, out, statistics, block)

    def through_merge() -> AttentionGrads:
        own_out, own = with_statistics(kernel, q, k, v, block)
        share = xp.exp((own.largest - statistics.largest) + (own.log_total - statistics.log_total))  # (…, H, n_q)
        own_mean, mean = (row_sum(xp, wide_dout, widen(xp, x)) for x in (own_out, out))
        empty, zero = xp.equal(own.log_total, -math.inf), xp.zeros_like(share)
        own_dout = xp.where(empty[..., None], xp.zeros_like(wide_dout), share[..., None] * wide_dout)
        shift = own_mean - mean if dlse is None else own_mean - mean + cast(xp, dlse, mean.dtype)
        own_dlse = xp.where(empty, zero, share * shift)
        return kernel.backward(cast(xp, own_dout, dout.dtype), own_dlse, q, k, v, own_out, own, block)

    wide_q, wide_k, wide_v, wide_dout = (widen(xp, x) for x in (q, k, v, dout))
    a_little_stricter = replace(block, scale=block.scale * 1.0625)  # than the kernels, which round differently
    moderate = is_moderate(wide_q, wide_k, wide_v, statistics, a_little_stricter, wide_dout)
    return block.backend.cond(moderate, of_whole_rows, through_merge)  # type: ignore[no-any-return]  # a backend is Any here


def sinks_gradient(
    dout: Array, out: Array, statistics: RowStatistics, problem: Problem, dlse: Array | None = None
) -> Array | None:
    """Return the gradient of the sinks over some whole rows, (H,)."""
    if problem.sinks is None:
        return None
    xp = problem.xp
    shift = -row_sum(xp, widen(xp, dout), widen(xp, out))
    shift = shift if dlse is None else shift + cast(xp, dlse, shift.dtype)
    weighted = sink_weights(*statistics, problem) * shift  # (…, H, n_q)
    return cast(xp, xp.sum(weighted, axis=(*range(weighted.ndim - 2), -1)), problem.sinks.dtype)
