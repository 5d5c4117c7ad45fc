"""The backward of a part of a problem: some of the keys, with the result and the statistics over all keys."""

from __future__ import annotations

import math
from dataclasses import replace

from ._arrays import Array, cast, widen
from ._plain import row_sum
from ._problem import AttentionGrads, Kernel, Problem, RowStatistics
from ._tiled import with_statistics
from ._units import is_moderate

__all__ = ["part_backward"]


def part_backward(
    kernel: Kernel, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
    statistics: RowStatistics, problem: Problem,
) -> AttentionGrads:  # fmt: skip
    """Return the gradients of a part, given the result and the statistics over the keys of all parts.

    Where scores are large, a kernel computes the row statistics again, from the keys that it has, which are not all.
    The gradient then goes through the merge, with c the share of the part in each row: out = Σ c · own_out over the
    parts, and c = exp(own_lse − lse).
    """
    xp = problem.xp

    def of_whole_rows() -> AttentionGrads:
        return kernel.backward(dout, dlse, q, k, v, out, statistics, problem)

    def through_merge() -> AttentionGrads:
        own_out, own = with_statistics(kernel, q, k, v, problem)
        share = xp.exp((own.largest - statistics.largest) + (own.log_total - statistics.log_total))  # (…, H, n_q)
        own_mean, mean = (row_sum(xp, dout_, widen(xp, x)) for x in (own_out, out))
        own_dlse = own_mean - mean if dlse is None else own_mean - mean + cast(xp, dlse, mean.dtype)
        empty = xp.equal(own.log_total, -math.inf)
        own_dlse = xp.where(empty, xp.zeros_like(share), share * own_dlse)
        own_dout = xp.where(empty[..., None], xp.zeros_like(dout_), share[..., None] * dout_)
        return kernel.backward(cast(xp, own_dout, dout.dtype), own_dlse, q, k, v, own_out, own, problem)

    q_, k_, v_, dout_ = (widen(xp, x) for x in (q, k, v, dout))
    a_little_stricter = replace(problem, scale=problem.scale * 1.0625)  # than the kernels, which round differently
    moderate = is_moderate(q_, k_, v_, statistics, a_little_stricter, dout_)
    return problem.backend.cond(moderate, of_whole_rows, through_merge)  # type: ignore[no-any-return]  # a backend is Any here
