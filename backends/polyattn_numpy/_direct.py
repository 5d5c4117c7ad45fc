"""The direct kernel: the formula for small problems, with all scores at once, without tiles or threads.

Decoding is a small problem for any number of keys, because one query has one score for each key.
Vaswani et al., "Attention is all you need" (2017), equation 1. If a result is not finite, the generic
kernel computes the problem, because it isolates excluded keys.
"""

from __future__ import annotations

import math

import numpy as np

from polyattn.backend import (
    AlibiBias,
    Array,
    AttentionGrads,
    Problem,
    RowStatistics,
    TiledKernel,
    allowed_in,
    expand,
    unbroadcast,
)

from ._blocked import cap, moderate, wide
from ._blocked_kernel import BlockedKernel
from ._threads import blas_within_limit

__all__ = ["DirectKernel"]

TILED, BLOCKED = TiledKernel(), BlockedKernel()
SCORES = 2**16


class DirectKernel:
    """Attention with few scores, or of one query."""

    name = "direct"

    def supports(self, problem: Problem) -> str | None:
        """Support small problems that the blocked kernel supports, except dropout."""
        if problem.dropout:
            return "dropout is left to the kernels that work in tiles"
        if problem.sizes.n_q > 1 and math.prod(problem.sizes.scores) > SCORES:
            return f"it is for one query, or for at most {SCORES} scores"
        return BLOCKED.supports(problem)

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Return softmax(scale · q kᵀ + …) v, where the division is applied to the result, and the row statistics."""
        sizes, dtype = problem.sizes, wide(problem)
        q_, k_, v_ = q.astype(dtype, copy=False), k.astype(dtype, copy=False), v.astype(dtype, copy=False)
        with blas_within_limit():
            scores, capped, allowed = _scores(q_, k_, problem)  # (…, H, n_q, n_k)
            lowest = capped.min()
            scores, total, largest = _exponentials(scores, allowed, problem)
            out = _by_head(_by_kv_head(scores, problem) @ v_, problem)  # (…, H, n_q, d_v)
        empty = total == 0
        if empty.any():
            if allowed is None or (allowed & empty).any():  # a row of −inf scores with an allowed pair
                return TILED.forward(q, k, v, problem)
            total = np.where(empty, 1, total)
        if not math.isfinite(out.sum()) or lowest == -math.inf:  # NaN, infinity, or an overflow
            return TILED.forward(q, k, v, problem)
        log_total = np.where(empty, -math.inf, np.log(total))
        rows = sizes.scores[:-1]
        statistics = RowStatistics(expand(np, largest[..., 0], rows), expand(np, log_total[..., 0], rows))
        return expand(np, out / total, (*rows, sizes.d_v)).astype(q.dtype, copy=False), statistics

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Compute the scores again, and then the lines of the forward in reverse."""
        dtype = wide(problem)
        q_, k_, v_, dout_ = (x.astype(dtype, copy=False) for x in (q, k, v, dout))
        with blas_within_limit():
            scores, capped, allowed = _scores(q_, k_, problem)
            dweights = _by_head(_by_kv_head(dout_, problem) @ v_.swapaxes(-1, -2), problem)  # (…, H, n_q, n_k)
            lse = statistics.lse
            if moderate(q_ * problem.scale, k_, lse, problem):
                lse = np.where(np.isneginf(lse), 0, lse)[..., None]  # (…, H, n_q, 1)
                weights = np.exp(scores - lse)  # with the batch axes that only v has
                shift = -np.vecdot(dout_, out, dtype=dtype)  # (…, H, n_q)
                sink_weights = 0 if problem.sinks is None else np.exp(problem.sinks[:, None] - lse[..., 0], dtype=dtype)
            else:  # the forward's statistics of large scores do not fit these scores exactly
                weights, total, largest = _exponentials(scores, allowed, problem)
                total = np.where(total == 0, 1, total)
                weights = weights / total
                shift = -np.vecdot(weights, dweights)
                sink_weights = (
                    0 if problem.sinks is None else (np.exp(problem.sinks[:, None, None] - largest) / total)[..., 0]
                )
            # out = weights v
            dv = _by_kv_head(weights, problem).swapaxes(-1, -2) @ _by_kv_head(dout_, problem)  # (…, H_kv, n_k, d_v)
            if dlse is not None:
                shift = shift + dlse
            dscores = weights * (dweights + shift[..., None])
            dbias = None if problem.bias_array is None else _like(dscores, problem.bias_array)
            dsinks = None if problem.sinks is None else _like((sink_weights * shift).sum(axis=-1), problem.sinks)
            if problem.softcap is not None:  # c · tanh(score / c)
                dscores = dscores * (1 - (capped / problem.softcap) ** 2)
            dscores = dscores * problem.scale  # not in place: dbias may share this memory
            dq = _by_head(_by_kv_head(dscores, problem) @ k_, problem)  # (…, H, n_q, d_k)
            dk = _by_kv_head(dscores, problem).swapaxes(-1, -2) @ _by_kv_head(q_, problem)  # (…, H_kv, n_k, d_k)
        grads = AttentionGrads(_like(dq, q), _like(dk, k), _like(dv, v), dbias, dsinks)
        if not all(math.isfinite(dx.sum()) for dx in grads if dx is not None):  # NaN, infinity, or an overflow
            return TILED.backward(dout, dlse, q, k, v, out, statistics, problem)
        return grads


def _exponentials(scores: Array, allowed: Array | None, problem: Problem) -> tuple[Array, Array, Array]:
    """Return exp(score − largest), computed in place, its row sums, and the largest scores; 0 in an empty row."""
    largest = scores.max(axis=-1, keepdims=True)  # (…, H, n_q, 1)
    if problem.sinks is not None:
        largest = np.maximum(largest, problem.sinks[:, None, None], dtype=scores.dtype)
    if allowed is not None or problem.sinks is not None:
        largest[np.isneginf(largest)] = 0  # empty rows
    np.exp(np.subtract(scores, largest, out=scores), out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if problem.sinks is not None:
        total += np.exp(problem.sinks[:, None, None] - largest)
    return scores, total, largest


def _scores(q: Array, k: Array, problem: Problem) -> tuple[Array, Array, Array | None]:
    """Return scores (…, H, n_q, n_k), −inf where excluded; scores before bias and mask; and the allowed pairs."""
    sizes = problem.sizes
    capped = scores = _by_head(_by_kv_head(q * problem.scale, problem) @ k.swapaxes(-1, -2), problem)
    cap(scores, problem)
    allowed = allowed_in(problem, slice(0, sizes.n_q), slice(0, sizes.n_k))
    if isinstance(problem.bias, AlibiBias):
        scores = scores + problem.bias.pairs(problem)
    elif problem.bias is not None:
        scores = scores + problem.bias.astype(scores.dtype, copy=False)
    elif problem.softcap is not None:
        scores = scores.copy()
    if allowed is not None:
        scores = np.where(allowed, scores, scores.dtype.type(-math.inf))
    return scores, capped, allowed


def _by_kv_head(x: Array, problem: Problem) -> Array:
    """Reshape ``(…, H, n, d)`` to ``(…, H_kv, groups · n, d)``: the query heads of a key head share one product."""
    sizes = problem.sizes
    if sizes.heads == sizes.kv_heads:
        return x
    return x.reshape(*x.shape[:-3], sizes.kv_heads, sizes.heads // sizes.kv_heads * x.shape[-2], x.shape[-1])


def _by_head(x: Array, problem: Problem) -> Array:
    """Reverse :func:`_by_kv_head`."""
    sizes = problem.sizes
    if sizes.heads == sizes.kv_heads:
        return x
    return x.reshape(*x.shape[:-3], sizes.heads, x.shape[-3] * x.shape[-2] // sizes.heads, x.shape[-1])


def _like(dx: Array, x: Array) -> Array:
    """Sum a gradient over the axes along which ``x`` was broadcast, and return it in the dtype of ``x``."""
    return unbroadcast(np, dx, x.shape).astype(x.dtype, copy=False)
