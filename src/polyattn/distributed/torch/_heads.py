"""Attention by an exchange of heads for positions: each rank computes some heads over the whole sequence.

Jacobs et al., "DeepSpeed Ulysses: system optimizations for enabling training of extreme long sequence transformer
models" (2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import distributed

from ...errors import ShapeError
from ...kernels import AlibiBias, AttentionGrads, Problem, RowStatistics
from .. import _block as block
from .._block import Span
from ._shards import in_order
from ._transfer import Ranks

__all__ = ["Heads", "expect_divisible"]

Tensor = Any
Pieces = list[tuple[Span, ...]]


@dataclass(frozen=True)
class Heads:
    """One call on a shard: the problem over all positions and heads, and the pieces of each rank."""

    problem: Problem
    ranks: Ranks
    queries: Pieces
    keys: Pieces
    q_segments: Tensor | None = None
    k_segments: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, RowStatistics, tuple[Tensor, ...]]:
        """Return the rows of this rank; then the statistics, q, k, v and out of this rank's heads, all positions."""
        q, k, v = self._by_head(q, self.queries), self._by_head(k, self.keys), self._by_head(v, self.keys)
        mine = self._of_heads()
        if mine is None:
            rows = block.without_keys(q, v, self._share(self.problem))
        else:
            rows = block.forward(q, k, v, mine)
            if self.problem.sinks is not None:
                rows = block.joined(mine, block.without_keys(q, v, self._share(self.problem)), rows)
        out = rows.out.to(q.dtype)
        return self._by_position(out, self.queries), rows.statistics, (q, k, v, out)

    def backward(
        self, dout: Tensor, statistics: RowStatistics, q: Tensor, k: Tensor, v: Tensor, out: Tensor
    ) -> AttentionGrads:
        """Return the gradients of the shards; those of sinks and of a table are of the heads of this rank."""
        dout, mine = self._by_head(dout, self.queries), self._of_heads()
        grads = AttentionGrads(torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, None)
        if mine is not None:
            grads = block.backward(dout, q, k, v, out, statistics, mine)
        pieces = (self.queries, self.keys, self.keys)
        dq, dk, dv = (self._by_position(dx, at) for dx, at in zip(grads[:3], pieces, strict=True))
        dtable = dsinks = None
        if self.problem.table is not None:
            dtable = torch.zeros_like(self.problem.table)
            dtable[:, self._mine] = 0 if grads.bias is None else grads.bias
        if self.problem.sinks is not None:
            dsinks = torch.zeros_like(self.problem.sinks)
            dsinks[self._mine] = block.sinks_gradient(dout, out, statistics, self._share(self.problem))
        return AttentionGrads(dq, dk, dv, dtable, dsinks)

    @property
    def _mine(self) -> slice:
        """The query heads of this rank."""
        each = self.problem.sizes.heads // self.ranks.size
        return slice(self.ranks.rank * each, (self.ranks.rank + 1) * each)

    def _share(self, problem: Problem) -> Problem:
        """Return the problem of this rank's heads, over all positions."""
        sizes, count, mine, bias = problem.sizes, self.ranks.size, self._mine, problem.bias
        numbers = None
        if problem.dropout:
            items = torch.arange(math.prod(sizes.batch), dtype=torch.int32, device=problem.device)[:, None]
            heads = torch.arange(mine.start, mine.stop, dtype=torch.int32, device=problem.device)
            numbers = (items * sizes.heads + heads).reshape(-1)
        return replace(
            problem,
            sizes=sizes._replace(heads=sizes.heads // count, kv_heads=sizes.kv_heads // count),
            sinks=None if problem.sinks is None else problem.sinks[mine],
            table=None if problem.table is None else problem.table[:, mine],
            bias=replace(bias, slopes=bias.slopes[mine]) if isinstance(bias, AlibiBias) else bias,
            numbers=numbers,
        )

    def _of_heads(self) -> Problem | None:
        """Return the block of all positions with this rank's heads."""
        sizes = self.problem.sizes
        q_ids, k_ids = self._everyones(self.q_segments, self.queries), self._everyones(self.k_segments, self.keys)
        return block.block_of(self._share(self.problem), Span(0, sizes.n_q), Span(0, sizes.n_k), q_ids, k_ids)

    def _everyones(self, ids: Tensor | None, pieces: Pieces) -> Tensor | None:
        """Return the segments of all positions, (…, n)."""
        if ids is None:
            return None
        again = ids[..., None, :, None].expand(*ids.shape[:-1], self.ranks.size, -1, 1)  # one head for each rank
        return self._by_head(again, pieces)[..., 0, :, 0]

    def _by_head(self, x: Tensor, pieces: Pieces) -> Tensor:
        """(…, H, n of this rank, d) → (…, H / P, n, d), in the order of positions."""
        parts = x.chunk(self.ranks.size, dim=-3)
        shapes = [(*parts[0].shape[:-2], sum(span.length for span in spans), x.shape[-1]) for spans in pieces]
        found = self._exchange(parts, shapes)
        return in_order(found, pieces, -2)

    def _by_position(self, x: Tensor, pieces: Pieces) -> Tensor:
        """(…, H / P, n, d) → (…, H, n of this rank, d): the reverse of :meth:`_by_head`."""
        parts = [
            torch.cat([x[..., span.start : span.start + span.length, :] for span in spans], dim=-2) for spans in pieces
        ]
        found = self._exchange(parts, [parts[self.ranks.rank].shape] * self.ranks.size)
        return torch.cat(found, dim=-3)

    def _exchange(self, sent: Any, shapes: list[Any]) -> list[Tensor]:
        """Send one tensor to each rank, and receive one of each shape; all in one collective."""
        sizes = [math.prod(shape) for shape in shapes]
        flat = torch.cat([x.reshape(-1) for x in sent])
        found = flat.new_empty(sum(sizes))
        with self.ranks.watched():
            distributed.all_to_all_single(
                found, flat, sizes, [x.numel() for x in sent], group=self.ranks.group
            )  # fmt: skip
        ends = list(accumulate(sizes))
        return [found[end - n : end].reshape(shape) for end, n, shape in zip(ends, sizes, shapes, strict=True)]


def expect_divisible(problem: Problem, ranks: Ranks) -> None:
    """Require heads that can be shared by the ranks."""
    sizes = problem.sizes
    if sizes.heads % ranks.size or sizes.kv_heads % ranks.size:
        raise ShapeError(
            f"method: expected numbers of heads that {ranks.size} ranks divide, got {sizes.heads} query heads and "
            f"{sizes.kv_heads} key heads; use method='ring', or a group of as many ranks as divide both"
        )
