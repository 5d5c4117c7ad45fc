"""Attention tile by tile on CuPy arrays: the loops around cuBLAS and the device code.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"FlashAttention" (2022), whose backward computes the weights again from the log-sum-exp.
Imported only once CuPy is in use.
"""

from __future__ import annotations

import cupy

from polyattn.backend import Array, Problem

from ._device import product
from ._work import Work, matrices, operand

__all__ = ["backward", "forward"]


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, Array]:
    """Sum over the keys of each tile of queries in units of the largest score so far, and divide once."""
    work, d_v = Work(problem), problem.sizes.d_v
    q, k, v = work.queries(q), work.keys(k), work.keys(v)
    out = cupy.empty((*q.shape[:-1], d_v), dtype=q.dtype)  # (B, kv_heads, groups, n_q, d_v)
    lse = cupy.empty(q.shape[:-1], dtype=work.dtype)
    scores = work.room()
    weights = scores if work.single else work.room(q.dtype)
    for batch in work.batches:
        k_b, v_b = matrices(k[batch]), operand(matrices(v[batch]), work.excludes)  # (N, n_k, d)
        for queries in work.query_tiles:
            rows = (batch, slice(None), slice(None), queries)
            q_t, shape = matrices(q[rows]), lse[rows].shape  # (N, rows, d_k)
            total, largest = work.start(shape)
            sums = cupy.zeros((*q_t.shape[:-1], d_v), dtype=work.dtype)
            for keys in work.key_tiles(queries):
                work.go_to(batch, queries, keys)
                scores_t, weights_t = work.tile(scores), work.tile(weights)
                product(q_t, k_b[:, keys], scores_t, transpose_b=True)
                work.by_row("exponentials", scores_t, weights_t, total, largest, sums, d_v)
                work.add_product(weights_t, v_b.cut(keys), sums)
            nonzero = cupy.where(total == 0, total.dtype.type(1), total)  # an empty row stays zeros
            out[rows] = sums.reshape(*shape, d_v) / nonzero[..., None]
            lse[rows] = cupy.log(total) + largest
    return out.reshape(*problem.sizes.scores[:-1], d_v), lse.reshape(problem.sizes.scores[:-1])


def backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, lse: Array, problem: Problem
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Compute each tile's weights again, and sum its share of every gradient."""
    work = Work(problem)
    q_, k_, v_ = work.queries(q), work.keys(k), work.keys(v)
    dout_ = work.queries(dout)  # (B, kv_heads, groups, n_q, d_v)
    lse = lse.reshape(q_.shape[:-1]).astype(work.dtype)
    # weights = softmax(scores): its Jacobian, with rowsum(weights · dweights) = rowsum(dout · out)
    shift = -row_sum(dout_.astype(work.dtype), work.queries(out).astype(work.dtype))
    if dlse is not None:
        shift = shift + dlse.reshape(shift.shape).astype(work.dtype)
    dq, dk, dv, dbias = sums_over_tiles(work, q_, k_, v_, dout_, lse, shift)
    dsinks = sinks_gradient(shift, lse, problem)
    # scores = scale · q kᵀ
    dq, dk, dv = (work.like(dx, x) for dx, x in ((dq * problem.scale, q), (dk * problem.scale, k), (dv, v)))
    if dbias is not None and problem.bias is not None:
        dbias = dbias.reshape(problem.bias.shape).astype(problem.bias.dtype)
    return dq, dk, dv, dbias, dsinks


def sums_over_tiles(
    work: Work, q: Array, k: Array, v: Array, dout: Array, lse: Array, shift: Array
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of q, k (without the scale), v and the bias, in the flattened axes."""
    dq, dk, dv = (cupy.zeros(x.shape, dtype=work.dtype) for x in (q, k, v))
    dbias = None if work.bias is None else cupy.zeros(work.bias.shape, dtype=work.dtype)
    scores, dweights = work.room(), work.room()
    weights, dscores = (x if work.single else work.room(q.dtype) for x in (scores, dweights))
    raw = dweights if dbias is None else work.room()
    for batch in work.batches:
        k_b, v_b = operand(matrices(k[batch]), work.excludes), matrices(v[batch])  # (N, n_k, d)
        dk_b, dv_b = matrices(dk[batch]), matrices(dv[batch])  # views
        for queries in work.query_tiles:
            rows = (batch, slice(None), slice(None), queries)
            q_t, dout_t = (operand(matrices(x[rows]), work.excludes) for x in (q, dout))  # (N, rows, d)
            lse_t, shift_t = (cupy.ascontiguousarray(x[rows]) for x in (lse, shift))
            dq_t = cupy.zeros(q_t.values.shape, dtype=work.dtype)
            for keys in work.key_tiles(queries):
                work.go_to(batch, queries, keys)
                scores_t, dweights_t, weights_t, dscores_t, raw_t = map(
                    work.tile, (scores, dweights, weights, dscores, raw)
                )
                product(q_t.values, k_b.values[:, keys], scores_t, transpose_b=True)
                product(dout_t.values, v_b[:, keys], dweights_t, transpose_b=True)
                work.by_row("gradients", scores_t, dweights_t, weights_t, dscores_t, raw_t, lse_t, shift_t)
                work.add_product(weights_t, dout_t, dv_b[:, keys], transposed=True)
                work.add_product(dscores_t, k_b.cut(keys), dq_t)
                work.add_product(dscores_t, q_t, dk_b[:, keys], transposed=True)
                if dbias is not None:
                    work.add_bias(dbias, raw_t)
            dq[rows] = dq_t.reshape(dq[rows].shape)
    return dq, dk, dv, dbias


def row_sum(dout: Array, out: Array) -> Array:
    """Return Σ dout · out of each row; 0 in an empty one, whose upstream, NaN or not, moves no sink."""
    total = cupy.sum(dout * out, axis=-1)
    return cupy.where(cupy.all(out == 0, axis=-1), total.dtype.type(0), total)


def sinks_gradient(shift: Array, lse: Array, problem: Problem) -> Array | None:
    """Return the sinks' gradient: a sink is one more score, whose weight meets no value."""
    if problem.sinks is None:
        return None
    sinks = problem.sinks.astype(lse.dtype).reshape(*lse.shape[1:3], 1)  # (kv_heads, groups, 1)
    weight = cupy.exp(sinks - cupy.where(lse == -cupy.inf, lse.dtype.type(0), lse))
    return cupy.sum(weight * shift, axis=(0, 3)).reshape(problem.sinks.shape).astype(problem.sinks.dtype)
