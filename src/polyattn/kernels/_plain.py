"""The plain kernel: the formula of attention, with all scores in one array. It runs on every backend.

Vaswani et al., "Attention is all you need" (2017), equation 1. It computes in
at least float32; excluded weights are exactly zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._arrays import Array, cast, dtype_name, expand, unbroadcast, widen
from ._dropout import keep_mask
from ._exclusion import matmul_excluding
from ._masks import allowed as allowed_pairs
from ._merge import Sums, finished
from ._problem import AttentionGrads, Problem, RowStatistics
from ._static import constant
from ._structure import StructuredBias, bias_pairs
from ._units import Units, divided, fits, gradient_unit, is_moderate, multiplied, row_units, value_unit

FLOAT32_MAX = constant((2 - 2**-23) * 2.0**127)


class Scores(NamedTuple):
    """The scores of a tile, in the units of their rows."""

    scores: Array  # after scale, softcap and bias; −inf where excluded
    capped: Array  # after scale and softcap, for the derivative of the softcap
    allowed: Array | None
    units: Units | None = None


class Rows(NamedTuple):
    """The statistics of rows over all keys, which the backward of a tile needs."""

    largest: Array  # (…, H, n_q), in the units of the row
    log_total: Array  # (…, H, n_q)
    shift: Array  # dlse − rowsum(dout · out), (…, H, n_q)
    units: Units | None = None


class PlainKernel:
    """The formula of :func:`polyattn.attention`, and its backward."""

    name = "plain"

    def supports(self, problem: Problem) -> str | None:
        """Support everything."""
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Return softmax(q kᵀ · scale + …) v and the row statistics."""
        return forward_in_units(problem, q, k, v, plain_forward)

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Return the gradients; the scores are computed again."""
        return backward_in_units(problem, dout, dlse, q, k, v, out, statistics, plain_rows, plain_gradients)


# ---- scores --------------------------------------------------------------------------------------------------------


def attention_scores(q: Array, k: Array, problem: Problem, units: Units | None = None) -> Scores:
    """Return the scores ``(…, H, n_q, n_k)``, −inf exactly where a pair is excluded."""
    xp = problem.xp
    # rounded: the largest score must be equal to one of the scores from which it is subtracted
    capped = scores = problem.backend.rounded(xp.matmul(divided(q, units), xp.matrix_transpose(k)) * problem.scale)
    if problem.softcap is not None:
        capped = scores = problem.backend.rounded(
            xp.tanh(multiplied(scores, units) / problem.softcap) * problem.softcap
        )
        scores = divided(scores, units)
    if problem.bias is not None:
        scores = scores + divided(narrowed(xp, bias_pairs(problem), scores.dtype), units)
    allowed = allowed_pairs(problem)
    if allowed is not None:
        scores = xp.where(allowed, scores, xp.full_like(scores, -math.inf))
    return Scores(scores, capped, allowed, units)


# ---- softmax -------------------------------------------------------------------------------------------------------


def exponentials(x: Scores, problem: Problem) -> tuple[Array, Array, Array]:
    """Return exp(score − largest), its sum over the keys and the sink, and the largest score; 0 in an empty row."""
    xp, scores, allowed = problem.xp, x.scores, x.allowed
    largest = xp.max(scores, axis=-1, keepdims=True)  # (…, H, n_q, 1)
    some = None if allowed is None else xp.any(allowed, axis=-1, keepdims=True)
    if problem.sinks is not None:
        sinks = divided(cast(xp, problem.sinks, scores.dtype)[:, None, None], x.units)  # (H, 1 or n_q, 1)
        largest = xp.maximum(largest, sinks)
        some = None if some is None else xp.logical_or(some, xp.greater(sinks, -math.inf))
    if some is not None:  # from the masks: a row with allowed scores that are all −inf stays NaN
        largest = xp.where(some, largest, xp.zeros_like(largest))
    exp = xp.exp(multiplied(scores - largest, x.units))  # (…, H, n_q, n_k)
    total = xp.sum(exp, axis=-1, keepdims=True)  # (…, H, n_q, 1)
    if problem.sinks is not None:
        total = total + xp.exp(multiplied(sinks - largest, x.units))
    return exp, total, largest


def normalised(x: Scores, largest: Array, log_total: Array, problem: Problem) -> Array:
    """Return the weights from the row statistics, exactly zero where excluded, also in a row with NaN."""
    xp, scores = problem.xp, x.scores
    largest, log_total = cast(xp, largest, scores.dtype), without_empty(xp, cast(xp, log_total, scores.dtype))
    weights = xp.exp(multiplied(scores - largest[..., None], x.units) - log_total[..., None])
    return weights if x.allowed is None else xp.where(x.allowed, weights, xp.zeros_like(weights))


def sink_weights(largest: Array, log_total: Array, problem: Problem, units: Units | None = None) -> Array:
    """Return the weight of the sink in each row, ``(…, H, n_q)``."""
    xp = problem.xp
    sinks = divided(cast(xp, problem.sinks, largest.dtype)[:, None, None], units)  # (H, 1 or n_q, 1)
    # In an empty row of several tiles the largest score is −inf as well.
    above = xp.where(xp.equal(sinks, -math.inf), sinks, sinks - largest[..., None])
    return xp.exp(xp.squeeze(multiplied(above, units), axis=-1) - without_empty(xp, log_total))


def without_empty(xp: Any, log_total: Array) -> Array:
    """Return the logarithm of the denominator, 0 in an empty row."""
    return xp.where(xp.equal(log_total, -math.inf), xp.zeros_like(log_total), log_total)


# ---- forward -------------------------------------------------------------------------------------------------------


def forward_in_units(problem: Problem, q: Array, k: Array, v: Array, forward: Any) -> tuple[Array, RowStatistics]:
    """Run ``forward(q, k, v, problem, units)``, with rows in units where a value may overflow."""
    xp = problem.xp

    def careful() -> tuple[Array, RowStatistics]:
        unit = value_unit(widen(xp, v), problem)
        out, statistics = forward(q, k, divided(widen(xp, v), unit), problem, row_units(q_, k_, problem))
        return cast(xp, multiplied(out, unit), q.dtype), statistics

    def ordinary() -> tuple[Array, RowStatistics]:
        out, statistics = forward(q, k, v, problem, None)
        return cast(xp, out, q.dtype), statistics

    q_, k_, v_ = (widen(xp, x) for x in (q, k, v))
    return problem.backend.cond(fits(q_, k_, v_, problem), ordinary, careful)  # type: ignore[no-any-return]  # a backend is Any here


def plain_forward(
    q: Array, k: Array, v: Array, problem: Problem, units: Units | None
) -> tuple[Array, RowStatistics]:  # fmt: skip
    """Return out, in at least float32, and the row statistics. The sums are divided once, at the end."""
    xp, rows = problem.xp, problem.sizes.scores[:-1]
    out, statistics = finished(xp, sums(q, k, v, problem, units), units)
    return expand(xp, out, (*rows, problem.sizes.d_v)), RowStatistics(*(expand(xp, x, rows) for x in statistics))


def sums(q: Array, k: Array, v: Array, problem: Problem, units: Units | None = None) -> Sums:
    """Return Σ exp(score) v and Σ exp(score) of each row over the keys, both divided by exp(largest)."""
    xp = problem.xp
    q_, k_, v_ = (widen(xp, x) for x in (q, repeat_heads(k, problem), repeat_heads(v, problem)))
    x = attention_scores(q_, k_, problem, units)  # (…, H, n_q, n_k)
    exp, total, largest = exponentials(x, problem)
    return Sums(matmul_excluding(problem.backend, dropped(exp, problem), v_, x.allowed), total, largest)


# ---- backward ------------------------------------------------------------------------------------------------------


def backward_in_units(
    problem: Problem, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
    statistics: RowStatistics, rows_of: Any, gradients: Any,
) -> AttentionGrads:  # fmt: skip
    """Run ``gradients(dout, q, k, v, rows, problem)``, with the row statistics computed again where scores are large.

    Two computations of a large score, by the forward and the backward or by two kernels, round it differently, and
    exp makes the difference a factor of every weight of a row. ``rows_of(dout, q, k, v, problem, units)`` then
    returns the statistics of the same scores that ``gradients`` computes, and rowsum(weights · dweights).
    """
    xp = problem.xp

    def ordinary() -> AttentionGrads:
        shift = -row_sum(xp, widen(xp, dout), widen(xp, out))
        shift = shift if dlse is None else shift + cast(xp, dlse, shift.dtype)
        rows = Rows(*statistics, shift)
        return in_dtypes(problem, q, k, v, gradients(dout, q, k, v, rows, problem), rows)

    def careful() -> AttentionGrads:
        unit, units = gradient_unit(dout_, v_, problem), row_units(q_, k_, problem)
        small = divided(dout_, unit)
        row = rows_of(small, q, k, v, problem, units)
        log_total = xp.squeeze(xp.log(row.total), axis=-1)
        shift = -xp.squeeze(row.out / nonzero(xp, row.total), axis=-1)
        shift = shift if dlse is None else shift + divided(cast(xp, dlse, shift.dtype), unit)
        rows = Rows(xp.squeeze(row.largest, axis=-1), log_total, shift, units)
        grads = gradients(small, q, k, v, rows, problem)
        return in_dtypes(problem, q, k, v, grads, rows, unit)

    q_, k_, v_, dout_ = (widen(xp, x) for x in (q, k, v, dout))
    moderate = is_moderate(q_, k_, v_, statistics, problem, dout_)
    return problem.backend.cond(moderate, ordinary, careful)  # type: ignore[no-any-return]  # a backend is Any here


def in_dtypes(
    problem: Problem, q: Array, k: Array, v: Array | None, grads: Any, rows: Rows, unit: Units | None = None
) -> AttentionGrads:  # fmt: skip
    """Return all gradients, that of the sinks included, multiplied by ``unit`` and in the dtypes of their arguments.

    A sink is one more score, without a value.
    """
    xp, sinks = problem.xp, problem.sinks
    dsinks = None
    if sinks is not None:
        weighted = sink_weights(rows.largest, rows.log_total, problem, rows.units) * rows.shift
        dsinks = xp.sum(weighted, axis=tuple(i for i in range(weighted.ndim) if i != weighted.ndim - 2))  # (H,)
    pairs = zip((*grads, dsinks), (q, k, v, problem.bias_array, sinks), strict=True)
    return AttentionGrads(*(None if dx is None else cast(xp, multiplied(dx, unit), x.dtype) for dx, x in pairs))


def plain_rows(dout: Array, q: Array, k: Array, v: Array, problem: Problem, units: Units | None) -> Sums:
    """Return Σ exp(score) · dweight and Σ exp(score) of each row over its keys, both divided by exp(largest)."""
    xp = problem.xp
    q_, k_, v_ = (widen(xp, x) for x in (q, repeat_heads(k, problem), repeat_heads(v, problem)))
    x = attention_scores(q_, k_, problem, units)
    exp, total, largest = exponentials(x, problem)
    dweights = dropped(xp.matmul(dout, xp.matrix_transpose(v_)), problem)
    # an excluded value may be NaN, and so may dout of a row without weights: neither may reach the sum
    products = xp.where(xp.equal(exp, 0), xp.zeros_like(dweights), exp * dweights)
    return Sums(xp.sum(products, axis=-1, keepdims=True), total, largest)


def plain_gradients(
    dout: Array, q: Array, k: Array, v: Array, rows: Rows, problem: Problem
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of q, k, v and the bias, in at least float32."""
    xp = problem.xp
    q_, k_, v_ = (widen(xp, x) for x in (q, repeat_heads(k, problem), repeat_heads(v, problem)))
    dout = widen(xp, dout)
    x = attention_scores(q_, k_, problem, rows.units)
    weights = normalised(x, rows.largest, rows.log_total, problem)

    # out = dropped(weights) v
    kept = xp.matrix_transpose(dropped(weights, problem))
    dv = matmul_excluding(problem.backend, kept, dout, transposed(xp, x.allowed))  # (…, H, n_k, d_v)
    dweights = dropped(xp.matmul(dout, xp.matrix_transpose(v_)), problem)  # (…, H, n_q, n_k)
    # weights = softmax(scores); rowsum(weights · dweights) = rowsum(dout · out)
    dscores = weights * (dweights + rows.shift[..., None])
    dq, dk, dbias = scores_backward(dscores, q_, k_, x.capped, x.allowed, problem)
    return unbroadcast(xp, dq, q.shape), sum_heads(dk, k, problem), sum_heads(dv, v, problem), dbias


def scores_backward(
    dscores: Array, q: Array, k: Array, capped: Array, allowed: Array | None, problem: Problem
) -> tuple[Array, Array, Array | None]:
    """Return the gradients of q, k (with repeated heads) and the bias; excluded ``dscores`` are ignored."""
    xp, backend = problem.xp, problem.backend
    zero = xp.zeros_like(dscores)
    if allowed is not None:
        dscores = xp.where(allowed, dscores, zero)
    dbias = bias_gradient(dscores, problem)
    # scores = softcap · tanh(scale · q kᵀ / softcap) + bias
    if problem.softcap is not None:
        dscores = dscores * (1 - (capped / problem.softcap) ** 2)
        if allowed is not None:
            dscores = xp.where(allowed, dscores, zero)  # a second time: an excluded score may be NaN
    dscores = dscores * problem.scale
    dq = matmul_excluding(backend, dscores, k, allowed)  # (…, H, n_q, d_k)
    dk = matmul_excluding(backend, xp.matrix_transpose(dscores), q, transposed(xp, allowed))  # (…, n_k, d_k)
    return dq, dk, dbias


def nonzero(xp: Any, total: Array) -> Array:
    """Return the denominator of the softmax, or 1 in an empty row, so that its zeros stay zeros."""
    return xp.where(xp.equal(total, 0), xp.ones_like(total), total)


def dropped(weights: Array, problem: Problem) -> Array:
    """Return the weights after inverted dropout. The function is linear and elementwise, hence its own backward."""
    if problem.dropout == 0:
        return weights
    xp = problem.xp
    if problem.dropout == 1:
        return xp.zeros_like(weights)
    return xp.where(keep_mask(problem), weights / (1 - problem.dropout), xp.zeros_like(weights))


def bias_gradient(dscores: Array, problem: Problem) -> Array | None:
    """Return the gradient of the bias, or of its table, from the gradient of the scores; sum over broadcast axes."""
    bias = problem.bias
    if isinstance(bias, StructuredBias):
        return bias.gradient(dscores, problem)
    return None if bias is None else unbroadcast(problem.xp, dscores, bias.shape)


def row_sum(xp: Any, dout: Array, out: Array) -> Array:
    """Return Σ dout · out of each row; 0 in an empty row, also if dout is NaN there."""
    empty = xp.all(xp.equal(out, 0), axis=-1)
    total = xp.sum(dout * out, axis=-1)
    return xp.where(empty, xp.zeros_like(total), total)


def narrowed(xp: Any, bias: Array, dtype: Any) -> Array:
    """Return the bias in the dtype of the scores; finite values stay finite, because −inf would exclude a pair."""
    if dtype_name(bias.dtype) == "float64" != dtype_name(dtype):
        bias = widen(xp, bias)
        bias = xp.where(xp.isfinite(bias), xp.clip(bias, -FLOAT32_MAX(), FLOAT32_MAX()), bias)
    return cast(xp, bias, dtype)


def repeat_heads(x: Array, problem: Problem) -> Array:
    """Repeat the key or value heads, so that there is one for each query head."""
    groups = problem.sizes.heads // problem.sizes.kv_heads
    return x if groups == 1 else problem.xp.repeat(x, groups, axis=-3)


def sum_heads(dx: Array, x: Array, problem: Problem) -> Array:
    """Sum over the repeats of each head and over broadcast leading axes: the backward of :func:`repeat_heads`."""
    xp: Any = problem.xp
    groups = problem.sizes.heads // problem.sizes.kv_heads
    if groups != 1:
        grouped = (*dx.shape[:-3], problem.sizes.kv_heads, groups, *dx.shape[-2:])
        dx = xp.sum(xp.reshape(dx, grouped), axis=-3)
    return unbroadcast(xp, dx, x.shape)


def transposed(xp: Any, allowed: Array | None) -> Array | None:
    """Transpose the query and key axes of a mask."""
    return None if allowed is None else xp.matrix_transpose(allowed)
