"""The plain kernel: attention as it is written, with all scores held at once. It runs everywhere.

Vaswani et al., "Attention is all you need" (2017), equation 1. Everything is in
float32 at least; excluded weights are exactly zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._arrays import Array, cast, dtype_name, expand, unbroadcast, widen
from ._dropout import keep_mask
from ._exclusion import matmul_excluding
from ._masks import allowed as allowed_pairs
from ._merge import Sums
from ._problem import Problem
from ._static import constant
from ._structure import StructuredBias, bias_pairs

FLOAT32_MAX = constant((2 - 2**-23) * 2.0**127)


class _Scores(NamedTuple):
    scores: Array  # after scale, softcap and bias; −inf where excluded
    capped: Array  # after scale and softcap, as the softcap's derivative needs it
    allowed: Array | None


class PlainKernel:
    """The formula of :func:`polyattn.attention`, and its backward beside it."""

    name = "plain"

    def supports(self, problem: Problem) -> str | None:
        """Support everything."""
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, Array]:
        """Return softmax(q kᵀ · scale + …) v, divided once on the result, and the log of the softmax's denominator."""
        xp = problem.xp
        out, lse = finished(xp, sums(q, k, v, problem))
        return cast(xp, out, q.dtype), expand(xp, lse, problem.sizes.scores[:-1])

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, lse: Array, problem: Problem
    ) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """Reverse the lines of the forward, with the scores computed again."""
        xp = problem.xp
        q_, k_, v_ = (widen(xp, x) for x in (q, repeat_heads(k, problem), repeat_heads(v, problem)))
        dout, out = widen(xp, dout), widen(xp, out)
        scores, capped, allowed = attention_scores(q_, k_, problem)
        weights = normalised(scores, lse, allowed, problem)

        # out = dropped(weights) v
        kept = xp.matrix_transpose(dropped(weights, problem))
        dv = matmul_excluding(problem.backend, kept, dout, transposed(xp, allowed))  # (…, H, n_k, d_v)
        dweights = dropped(xp.matmul(dout, xp.matrix_transpose(v_)), problem)  # (…, H, n_q, n_k)
        # weights = softmax(scores): its Jacobian, with rowsum(weights · dweights) = rowsum(dout · out)
        shift = -row_sum(xp, dout, out)  # (…, H, n_q)
        if dlse is not None:
            shift = shift + widen(xp, dlse)
        dscores = weights * (dweights + shift[..., None])
        dsinks = sinks_gradient(shift, lse, problem)
        dq, dk, dbias = scores_backward(dscores, q_, k_, capped, allowed, problem)

        dq = cast(xp, unbroadcast(xp, dq, q.shape), q.dtype)
        dk, dv = (cast(xp, sum_heads(dx, x, problem), x.dtype) for dx, x in ((dk, k), (dv, v)))
        return dq, dk, dv, dbias, dsinks


def sums(q: Array, k: Array, v: Array, problem: Problem) -> Sums:
    """Return what a set of keys adds to each row: Σ exp(score) v and Σ exp(score), in units of the largest."""
    xp = problem.xp
    q_, k_, v_ = (widen(xp, x) for x in (q, repeat_heads(k, problem), repeat_heads(v, problem)))
    scores, _, allowed = attention_scores(q_, k_, problem)  # (…, H, n_q, n_k)
    exp, total, largest = exponentials(scores, allowed, problem)
    return Sums(matmul_excluding(problem.backend, dropped(exp, problem), v_, allowed), total, largest)


def finished(xp: Any, row: Sums) -> tuple[Array, Array]:
    """Return the weighted mean, divided once, and the log of the denominator."""
    out = row.out / nonzero(xp, row.total)  # (…, H, n_q, d_v)
    return out, xp.squeeze(xp.log(row.total) + row.largest, axis=-1)  # (…, H, n_q)


def attention_scores(q: Array, k: Array, problem: Problem) -> _Scores:
    """Return the scores ``(…, H, n_q, n_k)``, −inf exactly where a pair is excluded."""
    xp = problem.xp
    capped = scores = xp.matmul(q, xp.matrix_transpose(k)) * problem.scale
    if problem.softcap is not None:
        capped = scores = xp.tanh(scores / problem.softcap) * problem.softcap
    if problem.bias is not None:
        scores = scores + narrowed(xp, bias_pairs(problem), scores.dtype)
    allowed = allowed_pairs(problem)
    if allowed is not None:
        scores = xp.where(allowed, scores, xp.full_like(scores, -math.inf))
    return _Scores(scores, capped, allowed)


def scores_backward(
    dscores: Array, q: Array, k: Array, capped: Array, allowed: Array | None, problem: Problem
) -> tuple[Array, Array, Array | None]:
    """Return the gradients of q, k (with its heads repeated) and the bias; ``dscores`` counts only where allowed."""
    xp, backend = problem.xp, problem.backend
    zero = xp.zeros_like(dscores)
    if allowed is not None:
        dscores = xp.where(allowed, dscores, zero)
    dbias = bias_gradient(dscores, problem)
    # scores = softcap · tanh(scale · q kᵀ / softcap) + bias
    if problem.softcap is not None:
        dscores = dscores * (1 - (capped / problem.softcap) ** 2)
        if allowed is not None:
            dscores = xp.where(allowed, dscores, zero)  # again: an excluded score may be NaN
    dscores = dscores * problem.scale
    dq = matmul_excluding(backend, dscores, k, allowed)  # (…, H, n_q, d_k)
    dk = matmul_excluding(backend, xp.matrix_transpose(dscores), q, transposed(xp, allowed))  # (…, n_k, d_k)
    return dq, dk, dbias


def exponentials(scores: Array, allowed: Array | None, problem: Problem) -> tuple[Array, Array, Array]:
    """Return exp(scores − largest), its sum over the keys and the sink, and the largest; zeros in an empty row."""
    xp = problem.xp
    largest = xp.max(scores, axis=-1, keepdims=True)  # (…, H, n_q, 1)
    some = None if allowed is None else xp.any(allowed, axis=-1, keepdims=True)
    if problem.sinks is not None:
        sinks = cast(xp, problem.sinks, scores.dtype)[:, None, None]  # (H, 1, 1)
        largest = xp.maximum(largest, sinks)
        some = None if some is None else xp.logical_or(some, xp.greater(sinks, -math.inf))
    if some is not None:  # decided by the masks: a row whose genuine scores are all −inf stays NaN
        largest = xp.where(some, largest, xp.zeros_like(largest))
    exp = xp.exp(scores - largest)  # (…, H, n_q, n_k)
    total = xp.sum(exp, axis=-1, keepdims=True)  # (…, H, n_q, 1)
    if problem.sinks is not None:
        total = total + xp.exp(sinks - largest)
    return exp, total, largest


def nonzero(xp: Any, total: Array) -> Array:
    """Return the softmax's denominator, 1 in an empty row: its zeros stay zeros."""
    return xp.where(xp.equal(total, 0), xp.ones_like(total), total)


def normalised(scores: Array, lse: Array, allowed: Array | None, problem: Problem) -> Array:
    """Return exp(scores − lse), exactly zero where excluded, also in a row whose lse is NaN."""
    xp = problem.xp
    lse = cast(xp, lse, scores.dtype)
    weights = xp.exp(scores - xp.where(xp.equal(lse, -math.inf), xp.zeros_like(lse), lse)[..., None])
    return weights if allowed is None else xp.where(allowed, weights, xp.zeros_like(weights))


def dropped(weights: Array, problem: Problem) -> Array:
    """Return the weights after inverted dropout; linear, so the same function is its own backward."""
    if problem.dropout == 0:
        return weights
    xp = problem.xp
    if problem.dropout == 1:
        return xp.zeros_like(weights)
    return xp.where(keep_mask(problem), weights / (1 - problem.dropout), xp.zeros_like(weights))


def bias_gradient(dscores: Array, problem: Problem) -> Array | None:
    """Sum the score gradient over the axes along which the bias was broadcast, or over what a table was read for."""
    bias = problem.bias
    if isinstance(bias, StructuredBias):
        return bias.gradient(dscores, problem)
    return None if bias is None else cast(problem.xp, unbroadcast(problem.xp, dscores, bias.shape), bias.dtype)


def row_sum(xp: Any, dout: Array, out: Array) -> Array:
    """Return Σ dout · out of each row; 0 in an empty one, whose upstream, NaN or not, moves no sink."""
    empty = xp.all(xp.equal(out, 0), axis=-1)
    total = xp.sum(dout * out, axis=-1)
    return xp.where(empty, xp.zeros_like(total), total)


def narrowed(xp: Any, bias: Array, dtype: Any) -> Array:
    """Return the bias in the dtype of the scores; what is finite stays so, since only −inf excludes."""
    if dtype_name(bias.dtype) == "float64" != dtype_name(dtype):
        bias = xp.where(xp.isfinite(bias), xp.clip(bias, -FLOAT32_MAX(), FLOAT32_MAX()), bias)
    return cast(xp, bias, dtype)


def sinks_gradient(shift: Array, lse: Array, problem: Problem) -> Array | None:
    """Return the sinks' gradient: a sink is one more score, whose weight meets no value."""
    if problem.sinks is None:
        return None
    xp, sinks = problem.xp, problem.sinks
    weight = xp.exp(widen(xp, sinks)[:, None] - xp.where(xp.equal(lse, -math.inf), xp.zeros_like(lse), lse))
    axes = tuple(i for i in range(shift.ndim) if i != shift.ndim - 2)
    return cast(xp, xp.sum(weight * shift, axis=axes), sinks.dtype)  # (H,)


def repeat_heads(x: Array, problem: Problem) -> Array:
    """Give every query head its own copy of the key or value head that it reads."""
    groups = problem.sizes.heads // problem.sizes.kv_heads
    return x if groups == 1 else problem.xp.repeat(x, groups, axis=-3)


def sum_heads(dx: Array, x: Array, problem: Problem) -> Array:
    """Reverse :func:`repeat_heads` and the broadcasting of the leading axes."""
    xp: Any = problem.xp
    groups = problem.sizes.heads // problem.sizes.kv_heads
    if groups != 1:
        grouped = (*dx.shape[:-3], problem.sizes.kv_heads, groups, *dx.shape[-2:])
        dx = xp.sum(xp.reshape(dx, grouped), axis=-3)
    return unbroadcast(xp, dx, x.shape)


def transposed(xp: Any, allowed: Array | None) -> Array | None:
    """Swap queries and keys in a mask."""
    return None if allowed is None else xp.matrix_transpose(allowed)
