"""Ring attention on the devices of a mesh axis: what each device runs inside ``shard_map``.

The loop over the steps of the ring and the loop over the pairs of pieces are loops of the compiled program, so that its
size does not depend on the number of devices. Forward, backward and tangents each go round once, by ``ppermute``.

Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite context" (2023).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax import numpy as jnp

from ... import registry
from ...functional._arguments import make_problem
from ...kernels import Array, AttentionGrads, Problem, RowStatistics, cast, widen
from ...kernels._jvp import Tangents, jvp_of_rows, rows_of, sinks_tangent
from ...kernels._plain import sink_weights
from .. import _block as block
from .._block import Rows, Span
from .._layout import Layout

__all__ = ["Inputs", "Ring"]


class Inputs(NamedTuple):
    """The arrays of a call: those before ``sinks`` and the segments are shards, the others are the same everywhere."""

    q: Array
    k: Array
    v: Array
    q_segments: Array | None
    k_segments: Array | None
    sinks: Array | None
    bias: Array | None
    """The table of a structured bias."""
    q_offset: Array | None
    key_lengths: Array | None
    seed: Array | None


class Held(NamedTuple):
    """What goes round: a shard of keys and values, their segments, and with tangents those of keys and values."""

    k: Array
    v: Array
    ids: Array | None
    k_dot: Array | None = None
    v_dot: Array | None = None


class Pair(NamedTuple):
    """One block: its problem, the numbers of its pieces, and a function that cuts a piece from an array."""

    problem: Problem
    query: Any
    key: Any


@dataclass(frozen=True)
class Ring:
    """The static part of a call: the mesh axis, the order of the pieces, and the static arguments of the problem."""

    axis: str
    size: int
    layout: Layout
    options: tuple[tuple[str, Any], ...]

    @property
    def pieces(self) -> int:
        """The number of pieces of a shard."""
        return 1 if self.layout == "contiguous" else 2

    def forward(self, x: Inputs) -> Rows:
        """Return the rows of this device, in at least float32."""
        problem = self._problem(x)
        found = block.without_keys(x.q, x.v, problem)

        def add(found: Rows, held: Held, pair: Pair) -> Rows:
            q_t, (k_t, v_t) = self._cut(x.q, pair.query, -2), (self._cut(y, pair.key, -2) for y in held[:2])
            before = Rows(self._cut(found.out, pair.query, -2), self._of_rows(found.statistics, pair.query))
            now = block.joined(problem, before, block.forward(q_t, k_t, v_t, pair.problem))
            out = self._put(found.out, now.out, pair.query, -2)
            rows = zip(found.statistics, now.statistics, strict=True)
            return Rows(out, RowStatistics(*(self._put(y, y_t, pair.query, -1) for y, y_t in rows)))

        rows: Rows = self._round(x, problem, Held(x.k, x.v, x.k_segments), found, add)
        return rows

    def backward(self, dout: Array, x: Inputs, rows: Rows) -> AttentionGrads:
        """Return the gradients of the shards, and the contribution of this device's queries to those of the others."""
        problem, xp, out = self._problem(x), jnp, rows.out
        dtable = None if x.bias is None else xp.zeros_like(x.bias)

        def add(grads: AttentionGrads, held: Held, pair: Pair) -> AttentionGrads:
            q_t, dout_t, out_t = (self._cut(y, pair.query, -2) for y in (x.q, dout, out))
            k_t, v_t = (self._cut(y, pair.key, -2) for y in held[:2])
            statistics = self._of_rows(rows.statistics, pair.query)
            now = block.backward(dout_t, q_t, k_t, v_t, out_t, statistics, pair.problem)
            places = ((grads.q, now.q, pair.query), (grads.k, now.k, pair.key), (grads.v, now.v, pair.key))
            dq, dk, dv = (self._put(y, self._cut(y, i, -2) + more, i, -2) for y, more, i in places)
            return AttentionGrads(dq, dk, dv, None if grads.bias is None else grads.bias + now.bias, None)

        dq, dk, dv = (xp.zeros_like(widen(xp, y)) for y in (x.q, x.k, x.v))
        found = self._round(
            x, problem, Held(x.k, x.v, x.k_segments), AttentionGrads(dq, dk, dv, dtable, None), add,
            follow=lambda grads: grads._replace(k=self._onward(grads.k), v=self._onward(grads.v)),
        )  # fmt: skip
        dq, dk, dv = (cast(xp, dy, y.dtype) for dy, y in zip(found[:3], (x.q, x.k, x.v), strict=True))
        dsinks = block.sinks_gradient(dout, out, rows.statistics, problem)
        return AttentionGrads(dq, dk, dv, found.bias, dsinks)

    def tangents(self, moved: Tangents, x: Inputs, rows: Rows) -> Array:
        """Return the tangent of the result, in at least float32."""
        problem = self._problem(x)
        none = (None if y is None else jnp.zeros_like(y) for y in (x.k, x.v))
        k_dot, v_dot = (y if y is not None else zero for y, zero in zip((moved.k, moved.v), none, strict=True))
        out_dot = jnp.zeros_like(rows.out)
        if moved.sinks is not None:
            weights = sink_weights(*rows.statistics, problem)
            out_dot = -(weights * sinks_tangent(moved.sinks, problem))[..., None] * rows.out

        def add(out_dot: Array, held: Held, pair: Pair) -> Array:
            q_t, out_t = (self._cut(y, pair.query, -2) for y in (x.q, rows.out))
            q_dot = None if moved.q is None else self._cut(moved.q, pair.query, -2)
            k_t, v_t, k_dot, v_dot = (self._cut(y, pair.key, -2) for y in (held.k, held.v, held.k_dot, held.v_dot))
            row = rows_of(pair.problem, self._of_rows(rows.statistics, pair.query))
            of = Tangents(q_dot, k_dot, v_dot, moved.bias, None)
            now = jvp_of_rows(q_t, k_t, v_t, of, out_t, row, pair.problem)
            return self._put(out_dot, self._cut(out_dot, pair.query, -2) + now.out_dot, pair.query, -2)

        return self._round(x, problem, Held(x.k, x.v, x.k_segments, k_dot, v_dot), out_dot, add)

    # ---- the ring ----------------------------------------------------------------------------------------------------

    def _round(
        self, x: Inputs, problem: Problem, held: Held, carry: Any, add: Callable[[Any, Held, Pair], Any],
        follow: Callable[[Any], Any] = lambda carry: carry,
    ) -> Any:  # fmt: skip
        """Return the carry after ``add(carry, held, pair)`` of all blocks; after each step it is passed to ``follow``.

        The next shard is sent before the blocks of a step are computed, so that the transfer may overlap them.
        """
        rank = lax.axis_index(self.axis)

        def computed(step: Any, carry: Any, held: Held) -> Any:
            source = jnp.mod(rank - step, self.size)

            def of_pair(number: Any, carry: Any) -> Any:
                query, key = number // self.pieces, number % self.pieces
                spans = self._span(x.q, rank, query), self._span(x.k, source, key)
                q_ids, k_ids = (
                    None if ids is None else self._cut(ids, i, -1)
                    for ids, i in ((x.q_segments, query), (held.ids, key))
                )
                part = block.block_of(problem, *spans, q_ids, k_ids)
                return carry if part is None else add(carry, held, Pair(part, query, key))

            return follow(lax.fori_loop(0, self.pieces**2, of_pair, carry))

        def step(number: Any, state: tuple[Any, Held]) -> tuple[Any, Held]:
            carry, held = state
            following = jax.tree.map(self._onward, held)
            return computed(number, carry, held), following

        carry, held = lax.fori_loop(0, self.size - 1, step, (carry, held))
        return computed(self.size - 1, carry, held)

    def _onward(self, x: Array) -> Array:
        """Send an array to the next device, and return that of the previous one."""
        return lax.ppermute(x, self.axis, [(i, (i + 1) % self.size) for i in range(self.size)])

    def _problem(self, x: Inputs) -> Problem:
        """Return the problem over all positions, without the segments, which are cut for each block."""
        arrays = {name: y for name, y in x._asdict().items() if y is not None and name not in SHARDED}
        return make_problem(registry.ready("jax"), x.q, None, **dict(self.options), **arrays)

    def _span(self, x: Array, rank: Any, piece: Any) -> Span:
        """Return the positions of a piece of a device."""
        length = x.shape[-2] // self.pieces
        number = rank if self.pieces == 1 else jnp.where(piece == 0, rank, 2 * self.size - 1 - rank)
        return Span(jnp.asarray(number * length, dtype=jnp.int32), length)

    def _cut(self, x: Array, piece: Any, axis: int) -> Array:
        """Return a piece of a shard."""
        length = x.shape[axis] // self.pieces
        return x if self.pieces == 1 else lax.dynamic_slice_in_dim(x, piece * length, length, x.ndim + axis)

    def _put(self, x: Array, value: Array, piece: Any, axis: int) -> Array:
        """Return a shard with another piece."""
        start = piece * (x.shape[axis] // self.pieces)
        return value if self.pieces == 1 else lax.dynamic_update_slice_in_dim(x, value, start, x.ndim + axis)

    def _of_rows(self, statistics: RowStatistics, piece: Any) -> RowStatistics:
        return RowStatistics(*(self._cut(y, piece, -1) for y in statistics))


SHARDED = ("q", "k", "v", "q_segments", "k_segments")
