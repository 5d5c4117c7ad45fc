"""The backward of attention's backward, tile by tile in linear memory.

The backward computes the gradients ∇L of L = ⟨dout, out⟩ + ⟨dlse, lse⟩. Their inner product with cotangents u of
dq, dk, dv, dbias and dsinks is the directional derivative of L along u,

    φ = ⟨u, ∇L⟩ = ⟨dout, out'⟩ + ⟨dlse, lse'⟩,

where a prime (``_dot`` in the code) is the derivative along u: out' and lse' are the tangents of ``_jvp.py`` for u. So

    ∂φ/∂dout = out',   ∂φ/∂dlse = lse',   ∂φ/∂(q, k, v, bias, sinks) = (∇∇L) u = (∇L)',

the last because second derivatives commute: it is the derivative of the backward along u, with dout and dlse constant.
The names are those of ``_jvp.py``. The lines of the backward are on the left, in its order, and their derivatives on
the right::

    dv = (D ⊙ P)ᵀ dout                          dv' = (D ⊙ P')ᵀ dout              P' = P ⊙ (S' − lse')
    δ  = dlse − rowsum(dout ⊙ out)              δ'  = − rowsum(dout ⊙ out')
    C  = D ⊙ (dout vᵀ) + δ                      C'  = D ⊙ (dout v'ᵀ) + δ'
    dS = P ⊙ C                                  dS' = P' ⊙ C + P ⊙ C'
    dsinks = Σ p₀ ⊙ δ                           dsinks' = Σ p₀ ⊙ ((sinks' − lse') ⊙ δ + δ')
    dbias = Σ dS                                dbias' = Σ dS'
    ds = g ⊙ dS,  g = 1 − (t / softcap)²        ds' = g ⊙ dS' − 2 t ⊙ t' / softcap² ⊙ dS
    dq = scale · ds k                           dq' = scale · (ds' k + ds k')
    dk = scale · dsᵀ q                          dk' = scale · (ds'ᵀ q + dsᵀ q')

The first pass over the tiles computes out' and lse', hence δ'; the second pass computes the rest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ._arrays import Array, cast, unbroadcast, wide, widen
from ._exclusion import matmul_excluding
from ._jvp import (
    MovingScores,
    Operands,
    Tangents,
    bias_tangent,
    dropout_of,
    in_own_units,
    jvp_of_rows,
    moving_scores,
    only,
    operands,
    product_tangent,
    rows_of,
    sinks_tangent,
)
from ._plain import Rows, bias_gradient, row_sum, sink_weights, sum_heads, transposed
from ._problem import Problem, RowStatistics
from ._tiled import Tile, add_at, cut, over_tiles, rows_at


class MovingRows(NamedTuple):
    """The inputs of a tile for each of its query rows."""

    dout: Array  # (…, H, n_q, d_v)
    rows: Rows  # ``rows.shift`` is dlse − rowsum(dout ⊙ out)
    shift_dot: Array  # (…, H, n_q)
    lse_dot: Array  # (…, H, n_q)


def backward_vjp(
    cotangents: Tangents, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
    statistics: RowStatistics, problem: Problem,
) -> tuple[Array, Array, Tangents]:  # fmt: skip
    """Return the cotangents of dout, of dlse, and of the inputs; None for inputs that the problem does not have."""

    def function(out: Array, rows: Rows) -> tuple[Array, Array, Tangents]:
        return vjp_of_rows(cotangents, dout, dlse, q, k, v, out, rows, problem)

    if problem.sizes.empty:
        return function(out, rows_of(problem, statistics))
    return in_own_units(function, q, k, v, out, statistics, problem)


def vjp_of_rows(
    cotangents: Tangents, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, rows: Rows,
    problem: Problem,
) -> tuple[Array, Array, Tangents]:  # fmt: skip
    """Return the cotangents, computed from the row statistics in ``rows``."""
    xp, bias = problem.xp, problem.bias_array
    first = jvp_of_rows(q, k, v, cotangents, out, rows, problem)
    dout = widen(xp, dout)
    shift, shift_dot = -row_sum(xp, dout, first.out), -row_sum(xp, dout, first.out_dot)  # (…, H, n_q)
    if dlse is not None:
        shift = shift + cast(xp, dlse, shift.dtype)
    row = MovingRows(dout, rows._replace(shift=shift), shift_dot, first.lse_dot)
    totals = tuple(None if x is None else xp.zeros_like(x, dtype=wide(xp, x.dtype)) for x in (q, k, v, bias))

    def body(carry: Any, tile: Tile, part: Problem) -> Any:
        x = operands(q, k, v, cotangents, tile, part)
        dout_t = cut(part, row.dout, tile.query, part.sizes.n_q, -2)
        shift_dot_t, lse_dot_t = (cut(part, y, tile.query, part.sizes.n_q, -1) for y in (row.shift_dot, row.lse_dot))
        row_t = MovingRows(dout_t, rows_at(part, row.rows, tile), shift_dot_t, lse_dot_t)
        moving = moving_scores(x, bias_tangent(cotangents.bias, problem, tile, part), row_t.rows, part)
        q_dot, k_dot, v_dot, bias_dot = tile_vjp(x, row_t, moving, part)
        k_t, v_t = (cut(part, y, tile.key, part.sizes.n_k, -2) for y in (k, v))
        parts = (unbroadcast(xp, q_dot, x.q.shape), sum_heads(k_dot, k_t, part), sum_heads(v_dot, v_t, part), bias_dot)
        of_bias = (tile.query, tile.key) if problem.table is None else (None, None)
        starts = ((tile.query, None), (tile.key, None), (tile.key, None), of_bias)
        return tuple(
            None if total is None else add_at(part, total, y, start)
            for total, y, start in zip(carry, parts, starts, strict=True)
        )

    if not problem.sizes.empty:
        totals = over_tiles(problem, body, totals)
    given = (None if x is None else cast(xp, y, x.dtype) for x, y in zip((q, k, v, bias), totals, strict=True))
    return first.out_dot, first.lse_dot, Tangents(*given)._replace(sinks=sinks_vjp(cotangents.sinks, row, problem))


def tile_vjp(
    x: Operands, row: MovingRows, moving: MovingScores, part: Problem
) -> tuple[Array, Array, Array, Array | None]:
    """Return the terms of one tile in the tangents of dq, dk, dv (for every query head) and dbias."""
    xp, backend, allowed, drop = part.xp, part.backend, moving.allowed, dropout_of(part)
    weights_dot = only(moving.weights * (moving.scores_dot - row.lse_dot[..., None]), allowed, part)
    v_dot = matmul_excluding(backend, xp.matrix_transpose(drop(weights_dot)), row.dout, transposed(xp, allowed))

    centred = drop(xp.matmul(row.dout, xp.matrix_transpose(x.v))) + row.rows.shift[..., None]  # (…, H, n_q, n_k)
    centred_dot = row.shift_dot[..., None]
    if x.v_dot is not None:
        centred_dot = centred_dot + drop(xp.matmul(row.dout, xp.matrix_transpose(x.v_dot)))
    dscores = only(moving.weights * centred, allowed, part)
    dscores_dot = only(weights_dot * centred + moving.weights * centred_dot, allowed, part)
    bias_dot = bias_gradient(dscores_dot, part)
    if part.softcap is not None:
        slope = 1 - (moving.capped / part.softcap) ** 2
        bend = -2 / part.softcap**2 * moving.capped * moving.capped_dot
        dscores, dscores_dot = (only(y, allowed, part) for y in (slope * dscores, slope * dscores_dot + bend * dscores))

    dscores, dscores_dot = dscores * part.scale, dscores_dot * part.scale
    q_dot = product_tangent(backend, (dscores, x.k), (dscores_dot, x.k_dot), allowed)  # (…, H, n_q, d_k)
    by_keys = tuple(xp.matrix_transpose(y) for y in (dscores, dscores_dot))  # (…, H, n_k, n_q)
    k_dot = product_tangent(backend, (by_keys[0], x.q), (by_keys[1], x.q_dot), transposed(xp, allowed))
    return q_dot, k_dot, v_dot, bias_dot


def sinks_vjp(tangent: Array | None, row: MovingRows, problem: Problem) -> Array | None:
    """Return the tangent of the gradient of the sinks. A sink is one more score, without a value."""
    if problem.sinks is None:
        return None
    xp = problem.xp
    moved = -row.lse_dot if tangent is None else sinks_tangent(tangent, problem) - row.lse_dot
    each = sink_weights(row.rows.largest, row.rows.log_total, problem, row.rows.units) * (
        moved * row.rows.shift + row.shift_dot
    )  # (…, H, n_q)
    return cast(xp, xp.sum(each, axis=tuple(i for i in range(each.ndim) if i != each.ndim - 2)), problem.sinks.dtype)
