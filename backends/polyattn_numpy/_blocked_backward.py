"""The backward of the blocked kernel: the lines of ``_blocked.Forward`` in reverse, under the same names.

Moderate scores: −lse is appended to the queries as a column, and ones to the keys, so that exp of one product
gives the normalised weights. Likewise, −rowsum(dout · out) is appended to dout, and ones to the values, so that
one product gives dweights − rowsum(dout · out). This is algorithm 4 of Dao et al., "FlashAttention" (2022),
with fewer passes over the scores.
Large scores: a first pass over the tiles computes the row statistics of exactly the scores of the second pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from polyattn.backend import Array, AttentionGrads, Problem, unbroadcast

from ._blocked import Buffers, NotFinite, cap, finite, moderate, score_bound, threads_for, wide
from ._layout import Call, Task, dense, folded
from ._threads import run

__all__ = ["backward"]


class Operands(NamedTuple):
    """The inputs of the backward, as ``folded`` returns them."""

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None


class Gradients(NamedTuple):
    """The results of the tasks. dk, dv and dsinks have a first axis for the pieces of the queries."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None


def backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, lse: Array, problem: Problem
) -> AttentionGrads:
    """Return the gradients; raise :class:`NotFinite` if one of them is not finite."""
    dtype = wide(problem)
    dq = np.empty((*problem.sizes.batch, *q.shape[-3:]), dtype=q.dtype)
    inner, qkv, rest = folded(problem, (q, k, v), (dout, out, lse, dlse, dq))
    call = Call(inner, threads_for(inner), dtype)
    tasks = call.tasks()
    pieces = 1 + max(task.piece for task in tasks)
    lead = (pieces, *inner.sizes.batch)
    grads = Gradients(
        dq=rest.pop(),
        dk=np.zeros((*lead, *qkv[1].shape[-3:]), dtype=dtype),
        dv=np.zeros((*lead, *qkv[2].shape[-3:]), dtype=dtype),
        dbias=None if inner.bias_array is None else np.zeros(inner.bias_array.shape, dtype=dtype),
        dsinks=None if problem.sinks is None else np.zeros((*lead, inner.sizes.heads), dtype=dtype),
    )
    # Several tasks add to the gradient of a broadcast bias: one thread makes their order deterministic.
    shared = inner.bias_array is not None and inner.bias_array.shape[:-1] != inner.sizes.scores[:-1]
    threads = 1 if shared else call.threads
    run(lambda: Backward(call, Operands(*qkv, *rest), grads).task, tasks, threads)
    dk, dv = (_summed(dx.sum(axis=0) if pieces > 1 else dx[0], x, problem) for dx, x in ((grads.dk, k), (grads.dv, v)))
    if grads.dbias is not None and not finite(grads.dbias):
        raise NotFinite
    dsinks = None if grads.dsinks is None else grads.dsinks.reshape(-1, inner.sizes.heads).sum(axis=0)
    bias = problem.bias_array
    dbias = None if bias is None or grads.dbias is None else grads.dbias.reshape(bias.shape)
    found = (unbroadcast(np, dq, q.shape), dk, dv, dbias, dsinks)
    like = (q, k, v, bias, problem.sinks)
    cast = (
        None if x is None or dx is None else dx.astype(x.dtype, copy=False) for dx, x in zip(found, like, strict=True)
    )
    return AttentionGrads(*cast)


class Backward:
    """The backward of one task at a time, with the buffers of one thread."""

    def __init__(self, call: Call, operands: Operands, grads: Gradients) -> None:
        self.call, self.operands, self.grads = call, operands, grads
        self.buffers = Buffers(call.dtype)
        self.large = False
        """Whether the current task has large scores, so that the backward computes the row statistics again."""
        self.own: tuple[Array, ...] | None = None
        """With large scores: the largest score of each row, and 1 / Σ exp(score − largest), (kv heads, rows)."""

    def task(self, task: Task) -> None:
        """Prepare the rows of a task; loop over its key tiles, and for each over the query tiles."""
        call, x, dtype = self.call, self.operands, self.call.dtype
        first, last = call.keys(task, task.start, task.stop)
        k, v = (dense(keys[task.entry][task.kv_heads, first:last], dtype) for keys in (x.k, x.v))
        q, dout = self._rows(task, k, v)  # (kv heads, rows, d_k + 1), (kv heads, rows, d_v + 1)
        dq = self.buffers.take("dq", (*q.shape[:2], k.shape[2]))
        dq.fill(0)
        for start, stop in call.tiles(task):
            here = slice(start - first, stop - first)
            dk, dv = (dx[task.piece][task.entry][task.kv_heads, start:stop] for dx in (self.grads.dk, self.grads.dv))
            self._keys(task, (start, stop), q, dout, k[:, here], v[:, here], dq, dk, dv)
            if not (finite(dk) and finite(dv)):
                raise NotFinite
        if not finite(dq):
            raise NotFinite
        to = call.by_row(self.grads.dq, task, task.start, task.stop)
        np.multiply(dq.reshape(to.shape), call.problem.scale, out=to, dtype=call.dtype, casting="unsafe")

    def _rows(self, task: Task, k: Array, v: Array) -> tuple[Array, Array]:
        """Return (scaled q, −lse) and (dout, dlse − rowsum(dout · out)), each joined along the last axis."""
        call, problem, x, dtype = self.call, self.call.problem, self.operands, self.call.dtype
        span = (task, task.start, task.stop)
        q_, dout_, out, lse = (call.by_row(y, *span) for y in (x.q, x.dout, x.out, x.lse))
        q = self.buffers.take("q", (*q_.shape[:3], q_.shape[3] + 1))  # (kv heads, queries, groups, d_k + 1)
        dout = self.buffers.take("dout", (*dout_.shape[:3], dout_.shape[3] + 1))
        np.multiply(q_, problem.scale, out=q[..., :-1], dtype=dtype)
        np.divide(dout_, 1 - problem.dropout, out=dout[..., :-1], dtype=dtype)  # kept weights have this factor
        lines = tuple(y.reshape(y.shape[0], -1, y.shape[3]) for y in (q, dout))
        self.own, self.large = None, not moderate(q[..., :-1], k, lse, problem)
        sinks = 0 if problem.sinks is None else problem.sinks[call.heads(task)].reshape(-1, 1, call.groups)
        if not self.large:
            lse = np.where(np.isneginf(lse), 0, lse)  # in an empty row every pair is excluded
            q[..., -1] = -lse
            shift = -np.vecdot(dout_, out, dtype=dtype)
            sink_weights = np.exp(sinks - lse, dtype=dtype)
        else:
            found = self._statistics(task, lines[0], lines[1], k, v)
            largest, total, mean = (y.reshape(lse.shape) for y in found)
            self.own = tuple(y.reshape(lines[0].shape[:2]) for y in (largest, 1 / total))
            shift = -mean / total
            sink_weights = np.exp(sinks - largest, dtype=dtype) / total
        if x.dlse is not None:
            shift += call.by_row(x.dlse, *span)
        dout[..., -1] = shift
        if problem.sinks is not None and self.grads.dsinks is not None:  # (kv heads, queries, groups)
            dsinks = (sink_weights * shift).sum(axis=1).reshape(-1)
            if not np.isfinite(dsinks).all():
                raise NotFinite
            self.grads.dsinks[task.piece][task.entry][call.heads(task)] = dsinks
        return lines[0], lines[1]

    def _statistics(self, task: Task, q: Array, dout: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
        """Return the largest score of each row, Σ exp(score − largest), and Σ exp(score − largest) · dweight.

        The scores are bitwise equal to those of :meth:`_weights`: the same products of the same arrays.
        """
        call, problem, dtype = self.call, self.call.problem, self.call.dtype
        if not math.isfinite(score_bound(q[..., :-1], k, problem)):
            raise NotFinite
        first, _ = call.keys(task, task.start, task.stop)
        largest, total, mean = np.full(q.shape[:2], -math.inf, dtype), *np.zeros((2, *q.shape[:2]), dtype)
        if problem.sinks is not None:
            sinks = problem.sinks[call.heads(task)].reshape(-1, 1, call.groups)
            largest.reshape(q.shape[0], -1, call.groups)[...] = sinks
            total[...] = largest != -math.inf
        for start, stop in call.tiles(task):
            here = slice(start - first, stop - first)
            k_t, v_t = self._beside_ones("k_t", k[:, here]), self._beside_ones("v_t", v[:, here])
            for rows, lines, (a, b), keys in self._row_tiles(task, (start, stop)):
                scores, _, excluded = self._scores(task, rows, (a, b), q[:, lines], k_t[:, :, keys])
                if excluded is not None:
                    np.copyto(excluded[1], -math.inf, where=excluded[0])
                dweights = np.matmul(
                    dout[:, lines, :-1], v_t[:, :-1, keys], out=self.buffers.take("dscores", scores.shape)
                )
                if problem.dropout:
                    dweights *= call.kept(task, rows, (a, b), self.buffers.take)
                before, top = largest[:, lines].copy(), largest[:, lines]
                np.maximum(top, scores.max(axis=-1), out=top)
                base = np.where(np.isneginf(top), 0, top)
                np.exp(np.subtract(scores, base[..., None], out=scores), out=scores)
                shrink = np.exp(before - base)
                for total_, new in ((total, scores.sum(axis=-1)), (mean, np.vecdot(scores, dweights))):
                    total_[:, lines] = total_[:, lines] * shrink + new
        return np.where(np.isneginf(largest), 0, largest), np.where(total == 0, 1, total), mean

    def _row_tiles(
        self, task: Task, columns: tuple[int, int]
    ) -> Iterator[tuple[tuple[int, int], slice, tuple[int, int], slice]]:
        """Yield the query tiles that attend to a key tile: queries, rows of the task, keys, keys within the tile."""
        call = self.call
        for start in range(task.start, task.stop, call.rows):
            rows = (start, min(start + call.rows, task.stop))
            first, last = call.keys(task, *rows)
            a, b = max(columns[0], first), min(columns[1], last)
            if a < b:
                yield rows, _span(task, rows, call.groups), (a, b), slice(a - columns[0], b - columns[0])

    def _keys(
        self, task: Task, columns: tuple[int, int], q: Array, dout: Array, k: Array, v: Array,
        dq: Array, dk: Array, dv: Array,
    ) -> None:  # fmt: skip
        """Write the gradients of a key tile to dk and dv, which must be zero, and add its part of dq."""
        take = self.buffers.take
        k_t, v_t = self._beside_ones("k_t", k), self._beside_ones("v_t", v)  # (kv heads, d + 1, keys)
        untouched = True
        for rows, here, (a, b), keys in self._row_tiles(task, columns):
            operands = q[:, here], dout[:, here], k_t[:, :, keys], v_t[:, :, keys]
            weights, dscores = self._tile(task, rows, (a, b), here, *operands)
            dq[:, here] += np.matmul(dscores, k[:, keys], out=take("dq'", dq[:, here].shape))
            for dx, left, right in ((dv, weights, dout), (dk, dscores, q)):
                if untouched and (a, b) == columns:
                    np.matmul(left.swapaxes(1, 2), right[:, here, :-1], out=dx)
                else:
                    part = take("part", (*dx.shape[:1], b - a, dx.shape[2]))
                    dx[:, keys] += np.matmul(left.swapaxes(1, 2), right[:, here, :-1], out=part)
            untouched = False

    def _tile(
        self, task: Task, rows: tuple[int, int], columns: tuple[int, int], lines: slice, q: Array, dout: Array,
        k_t: Array, v_t: Array,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Return the weights of a tile after dropout, and the gradient of its scores, without the scale."""
        call, problem = self.call, self.call.problem
        weights, capped = self._weights(task, rows, columns, lines, q, k_t)
        dscores = self.buffers.take("dscores", weights.shape)
        if problem.dropout:
            keep = call.kept(task, rows, columns, self.buffers.take)
            np.matmul(dout[..., :-1], v_t[:, :-1], out=dscores)
            dscores *= keep
            dscores += dout[..., -1:]
            dscores *= weights
            weights *= keep
        else:
            np.matmul(dout, v_t, out=dscores)
            dscores *= weights
        if self.grads.dbias is not None:
            by_head = dscores.reshape(dscores.shape[0], rows[1] - rows[0], -1, dscores.shape[2])
            self._add_bias(by_head, call.pairs(self.grads.dbias, task, rows, columns))
        if capped is not None and problem.softcap is not None:  # c · tanh(score / c)
            capped /= problem.softcap
            dscores *= 1 - capped * capped
        return weights, dscores

    def _weights(
        self, task: Task, rows: tuple[int, int], columns: tuple[int, int], lines: slice, q: Array, k_t: Array
    ) -> tuple[Array, Array | None]:
        """Return the normalised weights of a tile, and its softcapped scores (None without a softcap)."""
        scores, capped, excluded = self._scores(task, rows, columns, q, k_t)
        if self.own is not None:
            scores -= self.own[0][:, lines, None]
        weights = np.exp(scores, out=scores)
        if self.own is not None:
            weights *= self.own[1][:, lines, None]
        if excluded is not None:
            np.copyto(excluded[1], 0, where=excluded[0])
        return weights, capped

    def _scores(
        self, task: Task, rows: tuple[int, int], columns: tuple[int, int], q: Array, k_t: Array
    ) -> tuple[Array, Array | None, tuple[Array, Array] | None]:
        """Return the scores of a tile, the softcapped scores (None without a softcap), and the excluded pairs.

        Moderate scores have lse subtracted. The excluded pairs come with the scores viewed by head, to index them.
        """
        call, problem, take = self.call, self.call.problem, self.buffers.take
        shape, capped, column = (*q.shape[:2], k_t.shape[2]), None, not self.large
        if problem.softcap is not None:
            capped = np.matmul(q[..., :-1], k_t[:, :-1], out=take("capped", shape))
            cap(capped, problem)
            scores = np.add(capped, q[..., -1:] if column else 0, out=take("scores", shape))
        elif column:
            scores = np.matmul(q, k_t, out=take("scores", shape))
        else:
            scores = np.matmul(q[..., :-1], k_t[:, :-1], out=take("scores", shape))
        by_head = scores.reshape(shape[0], rows[1] - rows[0], -1, shape[2])  # (kv heads, queries, groups, keys)
        if problem.bias is not None:
            by_head += call.bias(task, rows, columns)
        excluded = None if call.plain else call.excluded(task, rows, columns)
        return scores, capped, None if excluded is None else (excluded, by_head)

    def _add_bias(self, dscores: Array, dbias: Array) -> None:
        """Add the score gradient of a tile to that of the bias, summed over the broadcast axes of the bias."""
        axes = tuple(axis for axis, n in enumerate(dbias.shape) if n == 1)
        dbias += dscores.sum(axis=axes, keepdims=True)

    def _beside_ones(self, name: str, x: Array) -> Array:
        """Return ``x (kv heads, rows, d)`` transposed, ``(kv heads, d + 1, rows)``, with a last row of ones."""
        x_t = self.buffers.take(name, (x.shape[0], x.shape[2] + 1, x.shape[1]))
        x_t[:, :-1] = x.swapaxes(1, 2)
        x_t[:, -1] = 1
        return x_t


def _span(task: Task, rows: tuple[int, int], groups: int) -> slice:
    """Return the slice of a task's rows that holds these queries."""
    return slice((rows[0] - task.start) * groups, (rows[1] - task.start) * groups)


def _summed(dx: Array, x: Array, problem: Problem) -> Array:
    """Return the gradient of keys or values in their shape, summed over broadcast batch axes."""
    return unbroadcast(np, dx.reshape(*problem.sizes.batch, *x.shape[-3:]), x.shape)
