"""Ring attention: keys and values go round the ranks, and each rank computes with the shard that it holds.

The transfer of the next shard overlaps the computation with the current one. In the backward the gradients of keys and
values follow their shard round the ring, one step behind. A rank holds two shards of keys and values at a time.

Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...kernels import AttentionGrads, Problem, RowStatistics, widen
from .. import _block as block
from .._block import Rows, Span
from ._transfer import Ranks, Transfer, like

__all__ = ["Ring"]

Tensor = Any


class Pair(NamedTuple):
    """One block of this rank's queries with the keys that it holds: its problem, and where it is in both shards."""

    problem: Problem
    rows: slice
    keys: slice


@dataclass(frozen=True)
class Ring:
    """One call on a shard: the problem over all positions, and the pieces of queries and of keys of each rank."""

    problem: Problem
    ranks: Ranks
    queries: list[tuple[Span, ...]]
    keys: list[tuple[Span, ...]]
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, RowStatistics]:
        """Return the rows of this rank, in the dtype of q, and their statistics."""
        held, problem = self._shard(k, v), self.problem
        places = _places(self.queries[self.ranks.rank])
        found: list[Rows | None] = [
            None if problem.sinks is None else block.without_keys(q[..., rows, :], v, problem) for rows in places
        ]
        for step in range(self.ranks.size):
            transfer = self._turn(held, step)
            for pair in self._pairs(step, held):
                q_t, (k_t, v_t) = q[..., pair.rows, :], (x[..., pair.keys, :] for x in held[:2])
                now, i = block.forward(q_t, k_t, v_t, pair.problem), places.index(pair.rows)
                found[i] = block.joined(problem, found[i], now)
            held = held if transfer is None else transfer.wait()
        whole = [
            block.without_keys(q[..., rows, :], v, problem) if x is None else x
            for rows, x in zip(places, found, strict=True)
        ]
        out = torch.cat([x.out for x in whole], dim=-2).to(q.dtype)
        return out, RowStatistics(*(torch.cat(xs, dim=-1) for xs in zip(*(x.statistics for x in whole), strict=True)))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, statistics: RowStatistics
    ) -> AttentionGrads:
        """Return the gradients of the shards; those of sinks and of a table are of the queries of this rank."""
        xp, table = self.problem.xp, self.problem.table
        held, following = self._shard(k, v), None
        own: Sequence[Tensor] = ()
        dq, dtable = torch.zeros_like(widen(xp, q)), None if table is None else torch.zeros_like(table)
        for step in range(self.ranks.size):
            transfer = self._turn(held, step)
            grads = [torch.zeros_like(widen(xp, x)) for x in held[:2]]
            for pair in self._pairs(step, held):
                q_t, dout_t, out_t = (x[..., pair.rows, :] for x in (q, dout, out))
                k_t, v_t = (x[..., pair.keys, :] for x in held[:2])
                rows = RowStatistics(*(x[..., pair.rows] for x in statistics))
                now = block.backward(dout_t, q_t, k_t, v_t, out_t, rows, pair.problem)
                dq[..., pair.rows, :] += now.q
                for dx, more in zip(grads, (now.k, now.v), strict=True):
                    dx[..., pair.keys, :] += more
                dtable = dtable if dtable is None else dtable + now.bias
                del now
            if step == 0:
                own = grads
            else:  # add what the ranks before found for this shard, and pass it on
                following = self._follow(grads if following is None else _added(grads, following.wait()), step)
            held = held if transfer is None else transfer.wait()
        dk, dv = own if following is None else _added(own, following.wait())
        dsinks = block.sinks_gradient(dout, out, statistics, self.problem)
        return AttentionGrads(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dtable, dsinks)

    def _shard(self, k: Tensor, v: Tensor) -> Sequence[Tensor]:
        """Return what goes round: keys, values, and segments of keys as (…, n_k, 1)."""
        ids = [] if self.k_segments is None else [self.k_segments[..., None]]
        return [x.contiguous() for x in (k, v, *ids)]

    def _turn(self, held: Sequence[Tensor], step: int) -> Transfer | None:
        """Start to pass the held shard on, and to receive that of the next step; None in the last step."""
        if step + 1 == self.ranks.size:
            return None
        length = sum(span.length for span in self.keys[self._source(step + 1)])
        return Transfer(self.ranks, held, [like(x, length) for x in held])

    def _follow(self, grads: Sequence[Tensor], step: int) -> Transfer:
        """Start to pass on the gradients of the held shard, and to receive those of the shard of the next step."""
        length = sum(span.length for span in self.keys[self._source(step + 1)])
        return Transfer(self.ranks, grads, [like(x, length) for x in grads])

    def _source(self, step: int) -> int:
        """Return the rank whose keys this rank holds in a step."""
        return (self.ranks.rank - step) % self.ranks.size

    def _pairs(self, step: int, held: Sequence[Tensor]) -> Iterator[Pair]:
        """Yield the blocks of a step that are not excluded."""
        queries, keys = self.queries[self.ranks.rank], self.keys[self._source(step)]
        for rows, query in zip(_places(queries), queries, strict=True):
            for columns, key in zip(_places(keys), keys, strict=True):
                q_ids = None if self.q_segments is None else self.q_segments[..., rows]
                k_ids = None if self.k_segments is None else held[2][..., columns, 0]
                problem = block.block_of(self.problem, query, key, q_ids, k_ids)
                if problem is not None:
                    yield Pair(problem, rows, columns)


def _added(grads: Sequence[Tensor], more: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add to gradients that are not under way, in place: a sum of its own would be one more shard of memory."""
    for dx, dx_more in zip(grads, more, strict=True):
        dx += dx_more
    return grads


def _places(spans: tuple[Span, ...]) -> list[slice]:
    """Return where the pieces of a shard are in it."""
    found, start = [], 0
    for span in spans:
        found.append(slice(start, start + span.length))
        start += span.length
    return found
