"""The blocked kernel's backward: the lines of ``_blocked.Forward`` reversed, under the same names.

A column that holds −lse beside the queries, against ones beside the keys, makes
exp of one product the normalised weights; a column that holds −rowsum(dout · out)
beside dout, against ones beside the values, does the same for their gradient
(Dao et al., "FlashAttention", 2022, algorithm 4, without its passes over the scores).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polyattn.backend import Array, Problem, unbroadcast

from ._blocked import Buffers, NotFinite, cap, finite, threads_for, wide
from ._layout import Call, Task, dense, folded
from ._threads import run

__all__ = ["backward"]


class Operands(NamedTuple):
    """What the backward reads, as ``folded`` gives it."""

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None


class Gradients(NamedTuple):
    """What the tasks write. dk, dv and dsinks have a first axis for the pieces that the queries are cut into."""

    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array | None


def backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, lse: Array, problem: Problem
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Return the gradients; :class:`NotFinite` where one of them is not."""
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
    # A bias that several tasks read gets their gradients in one order.
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
    return tuple(cast)  # type: ignore[return-value]  # five of them


class Backward:
    """One thread's buffers, and the backward of a task."""

    def __init__(self, call: Call, operands: Operands, grads: Gradients) -> None:
        self.call, self.operands, self.grads = call, operands, grads
        self.buffers = Buffers(call.dtype)

    def task(self, task: Task) -> None:
        """Prepare the rows of a task, go through its keys, and for each tile of keys through the queries."""
        call, x, dtype = self.call, self.operands, self.call.dtype
        first, last = call.keys(task, task.start, task.stop)
        k, v = (dense(keys[task.entry][task.kv_heads, first:last], dtype) for keys in (x.k, x.v))
        q, dout = self._rows(task)  # (kv heads, rows, d_k + 1), (kv heads, rows, d_v + 1)
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

    def _rows(self, task: Task) -> tuple[Array, Array]:
        """Return scaled queries beside −lse, and dout beside what the softmax's Jacobian subtracts from dweights."""
        call, problem, x, dtype = self.call, self.call.problem, self.operands, self.call.dtype
        span = (task, task.start, task.stop)
        q_, dout_, out, lse = (call.by_row(y, *span) for y in (x.q, x.dout, x.out, x.lse))
        q = self.buffers.take("q", (*q_.shape[:3], q_.shape[3] + 1))  # (kv heads, queries, groups, d_k + 1)
        dout = self.buffers.take("dout", (*dout_.shape[:3], dout_.shape[3] + 1))
        np.multiply(q_, problem.scale, out=q[..., :-1], dtype=dtype)
        lse = np.where(np.isneginf(lse), 0, lse)  # in an empty row every pair is excluded in any case
        q[..., -1] = -lse
        np.divide(dout_, 1 - problem.dropout, out=dout[..., :-1], dtype=dtype)  # as a kept weight is
        shift = -np.vecdot(dout_, out, dtype=dtype)
        if x.dlse is not None:
            shift += call.by_row(x.dlse, *span)
        dout[..., -1] = shift
        if problem.sinks is not None and self.grads.dsinks is not None:
            heads = call.heads(task)
            sinks = problem.sinks[heads].reshape(-1, 1, call.groups)  # (kv heads, 1, groups)
            dsinks = (np.exp(sinks - lse, dtype=dtype) * shift).sum(axis=1).reshape(-1)
            if not np.isfinite(dsinks).all():
                raise NotFinite
            self.grads.dsinks[task.piece][task.entry][heads] = dsinks
        return q.reshape(q.shape[0], -1, q.shape[3]), dout.reshape(dout.shape[0], -1, dout.shape[3])

    def _keys(
        self, task: Task, columns: tuple[int, int], q: Array, dout: Array, k: Array, v: Array,
        dq: Array, dk: Array, dv: Array,
    ) -> None:  # fmt: skip
        """Put the gradients of a tile of keys into dk and dv, still zero, and add to dq what it gives the queries."""
        call, take = self.call, self.buffers.take
        k_t, v_t = self._beside_ones("k_t", k), self._beside_ones("v_t", v)  # (kv heads, d + 1, keys)
        untouched = True
        for start in range(task.start, task.stop, call.rows):
            rows = (start, min(start + call.rows, task.stop))
            first, last = call.keys(task, *rows)
            a, b = max(columns[0], first), min(columns[1], last)
            if a >= b:
                continue
            here, keys = _span(task, rows, call.groups), slice(a - columns[0], b - columns[0])
            operands = q[:, here], dout[:, here], k_t[:, :, keys], v_t[:, :, keys]
            weights, dscores = self._tile(task, rows, (a, b), *operands)
            dq[:, here] += np.matmul(dscores, k[:, keys], out=take("dq'", dq[:, here].shape))
            for dx, left, right in ((dv, weights, dout), (dk, dscores, q)):
                if untouched and (a, b) == columns:
                    np.matmul(left.swapaxes(1, 2), right[:, here, :-1], out=dx)
                else:
                    part = take("part", (*dx.shape[:1], b - a, dx.shape[2]))
                    dx[:, keys] += np.matmul(left.swapaxes(1, 2), right[:, here, :-1], out=part)
            untouched = False

    def _tile(
        self, task: Task, rows: tuple[int, int], columns: tuple[int, int], q: Array, dout: Array, k_t: Array, v_t: Array
    ) -> tuple[Array, Array]:
        """Return the weights of a tile after dropout, and the gradient of its scores before the scale."""
        call, problem = self.call, self.call.problem
        weights, capped = self._weights(task, rows, columns, q, k_t)
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
        self, task: Task, rows: tuple[int, int], columns: tuple[int, int], q: Array, k_t: Array
    ) -> tuple[Array, Array | None]:
        """Return the normalised weights of a tile, and its scores after a softcap, if there is one."""
        call, problem, take = self.call, self.call.problem, self.buffers.take
        shape, capped = (*q.shape[:2], k_t.shape[2]), None
        if problem.softcap is None:
            scores = np.matmul(q, k_t, out=take("scores", shape))
        else:
            capped = np.matmul(q[..., :-1], k_t[:, :-1], out=take("capped", shape))
            cap(capped, problem)
            scores = np.add(capped, q[..., -1:], out=take("scores", shape))
        by_head = scores.reshape(shape[0], rows[1] - rows[0], -1, shape[2])  # (kv heads, queries, groups, keys)
        if problem.bias is not None:
            by_head += call.bias(task, rows, columns)
        weights = np.exp(scores, out=scores)
        excluded = None if call.plain else call.excluded(task, rows, columns)
        if excluded is not None:
            np.copyto(by_head, 0, where=excluded)
        return weights, capped

    def _add_bias(self, dscores: Array, dbias: Array) -> None:
        """Add a tile's score gradient to the bias's, summed over the axes along which the bias was broadcast."""
        axes = tuple(axis for axis, n in enumerate(dbias.shape) if n == 1)
        dbias += dscores.sum(axis=axes, keepdims=True)

    def _beside_ones(self, name: str, x: Array) -> Array:
        """Return rows of d features as ``(kv heads, d + 1, rows)`` with ones below."""
        x_t = self.buffers.take(name, (x.shape[0], x.shape[2] + 1, x.shape[1]))
        x_t[:, :-1] = x.swapaxes(1, 2)
        x_t[:, -1] = 1
        return x_t


def _span(task: Task, rows: tuple[int, int], groups: int) -> slice:
    """Return where some queries stand among the rows of their task."""
    return slice((rows[0] - task.start) * groups, (rows[1] - task.start) * groups)


def _summed(dx: Array, x: Array, problem: Problem) -> Array:
    """Return the gradient of keys or values in their shape: unfolded, and summed over broadcast batch axes."""
    return unbroadcast(np, dx.reshape(*problem.sizes.batch, *x.shape[-3:]), x.shape)
