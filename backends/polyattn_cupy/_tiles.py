"""Attention tile by tile on CuPy arrays: the loops around cuBLAS and the device code.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
"FlashAttention" (2022), whose backward computes the weights again from the row statistics.
This module imports CuPy.
"""

from __future__ import annotations

import cupy

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics

from ._device import product
from ._work import Work, matrices, operand

__all__ = ["backward", "forward"]


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Compute the online softmax over the key tiles of each query tile, and normalise once at the end."""
    work, d_v = Work(problem), problem.sizes.d_v
    q, k, v = work.queries(q), work.keys(k), work.keys(v)
    units, q, factor = work.units(q), work.in_units(q), work.factor
    out = cupy.empty((*q.shape[:-1], d_v), dtype=q.dtype)  # (B, kv_heads, groups, n_q, d_v)
    tops, logs = (cupy.empty(q.shape[:-1], dtype=work.dtype) for _ in range(2))
    scores = work.room()
    weights = scores if work.single else work.room(q.dtype)
    for batch in work.batches:
        k_b, v_b = matrices(k[batch]), operand(matrices(v[batch]), work.excludes)  # (N, n_k, d)
        for queries in work.query_tiles:
            rows = (batch, slice(None), slice(None), queries)
            q_t, units_t, shape = matrices(q[rows]), cupy.ascontiguousarray(units[rows]), tops[rows].shape
            total, largest = work.start(shape, units_t)
            sums = cupy.zeros((*q_t.shape[:-1], d_v), dtype=work.dtype)
            for keys in work.key_tiles(queries):
                work.go_to(batch, queries, keys)
                scores_t, weights_t = work.tile(scores), work.tile(weights)
                product(q_t, k_b[:, keys], scores_t, transpose_b=True)
                work.by_row("exponentials", scores_t, weights_t, total, largest, sums, units_t, d_v, factor)
                work.add_product(weights_t, v_b.cut(keys), sums)
            nonzero = cupy.where(total == 0, total.dtype.type(1), total)  # an empty row stays zeros
            out[rows] = sums.reshape(*shape, d_v) / nonzero[..., None] / sums.dtype.type(factor)
            tops[rows] = cupy.where(total == 0, total.dtype.type(0), work.in_full(largest, units_t))
            logs[rows] = cupy.log(total)
    statistics = (x.reshape(problem.sizes.scores[:-1]) for x in (tops, logs))
    return out.reshape(*problem.sizes.scores[:-1], d_v), RowStatistics(*statistics)


def backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
    problem: Problem,
) -> AttentionGrads:  # fmt: skip
    """Compute each tile's weights again, and add the tile's part of every gradient."""
    work = Work(problem)
    q_, k_, v_ = work.queries(q), work.keys(k), work.keys(v)
    units, one = work.units(q_), work.unit_of_gradients(dout)
    dout_ = work.queries(dout)  # (B, kv_heads, groups, n_q, d_v)
    dout_ = dout_ / one.astype(dout_.dtype) if work.single else dout_
    largest, log_total = (x.reshape(q_.shape[:-1]).astype(work.dtype) for x in statistics)
    largest = work.divided(largest, units)
    log_total = cupy.where(log_total == -cupy.inf, log_total.dtype.type(0), log_total)
    # weights = softmax(scores); in its Jacobian, rowsum(weights · dweights) = rowsum(dout · out)
    shift = -row_sum(dout_.astype(work.dtype), work.queries(out).astype(work.dtype))
    if dlse is not None:
        shift = shift + dlse.reshape(shift.shape).astype(work.dtype) / one
    dq, dk, dv, dbias = sums_over_tiles(work, q_, k_, v_, dout_, (largest, log_total, shift, units))
    dsinks = sinks_gradient(work, shift * one, largest, log_total, units)
    # scores = scale · q kᵀ
    dq, dk, dv = (
        work.like(dx, x) for dx, x in ((dq * one * problem.scale, q), (dk * one * problem.scale, k), (dv * one, v))
    )
    if dbias is not None and problem.bias is not None:
        dbias = (dbias * one).reshape(problem.bias.shape).astype(problem.bias.dtype)
    return AttentionGrads(dq, dk, dv, dbias, dsinks)


def sums_over_tiles(
    work: Work, q: Array, k: Array, v: Array, dout: Array, of_rows: tuple[Array, Array, Array, Array]
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of q and k (without the scale), v and the bias, with flattened axes.

    ``of_rows`` holds the largest scores, the logarithms of the totals, dlse − rowsum(dout · out), and the units.
    """
    in_units = work.in_units(q)
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
            scaled_t, rows_t = matrices(in_units[rows]), [cupy.ascontiguousarray(x[rows]) for x in of_rows]
            dq_t = cupy.zeros(q_t.values.shape, dtype=work.dtype)
            for keys in work.key_tiles(queries):
                work.go_to(batch, queries, keys)
                scores_t, dweights_t, weights_t, dscores_t, raw_t = map(
                    work.tile, (scores, dweights, weights, dscores, raw)
                )
                product(scaled_t, k_b.values[:, keys], scores_t, transpose_b=True)
                product(dout_t.values, v_b[:, keys], dweights_t, transpose_b=True)
                work.by_row("gradients", scores_t, dweights_t, weights_t, dscores_t, raw_t, *rows_t)
                work.add_product(weights_t, dout_t, dv_b[:, keys], transposed=True)
                work.add_product(dscores_t, k_b.cut(keys), dq_t)
                work.add_product(dscores_t, q_t, dk_b[:, keys], transposed=True)
                if dbias is not None:
                    work.add_bias(dbias, raw_t)
            dq[rows] = dq_t.reshape(dq[rows].shape)
    return dq, dk, dv, dbias


def row_sum(dout: Array, out: Array) -> Array:
    """Return Σ dout · out of each row; 0 in an empty row, so that a NaN in its dout does not reach the sinks."""
    total = cupy.sum(dout * out, axis=-1)
    return cupy.where(cupy.all(out == 0, axis=-1), total.dtype.type(0), total)


def sinks_gradient(work: Work, shift: Array, largest: Array, log_total: Array, units: Array) -> Array | None:
    """Return the gradient of the sinks: a sink is one more score, and its value is zero."""
    given = work.problem.sinks
    if given is None:
        return None
    sinks = cupy.broadcast_to(given.astype(shift.dtype).reshape(*shift.shape[1:3], 1), shift.shape)
    weight = cupy.exp(work.in_full(work.divided(sinks, units) - largest, units) - log_total)
    return cupy.sum(weight * shift, axis=(0, 3)).reshape(given.shape).astype(given.dtype)
