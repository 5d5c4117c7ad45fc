"""Forward mode: the tangents of attention along tangents of its inputs, tile by tile in linear memory.

With s = scale · q kᵀ, t = softcap(s), S = t + bias, P = exp(S − lse) the weights, D the factors of dropout
(0 or 1 / (1 − p)), p₀ the weight of a sink, and a prime for a tangent (``_dot`` in the code), the derivatives of the
lines of the forward are::

    s'   = scale · (q' kᵀ + q k'ᵀ)
    t'   = (1 − (t / softcap)²) ⊙ s'
    S'   = t' + bias'
    lse' = rowsum(P ⊙ S') + p₀ ⊙ sinks'
    P'   = P ⊙ (S' − lse')
    out' = (D ⊙ P') v + (D ⊙ P) v' = (D ⊙ P ⊙ S') v + (D ⊙ P) v' − lse' ⊙ out

The second form of the last line needs lse' only at the end, so that one pass over the tiles computes both tangents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from ._arrays import Array, cast, dtype_name, wide, widen
from ._dropout import keep_mask
from ._exclusion import matmul_excluding
from ._plain import Rows, attention_scores, nonzero, normalised, repeat_heads, sink_weights
from ._problem import Problem, RowStatistics
from ._structure import StructuredBias, bias_pairs
from ._tiled import Loop, Tile, add_at, cut, over_tiles, part_of, rows_at, tiled_sums
from ._units import is_moderate, row_units

Result = TypeVar("Result")


class Tangents(NamedTuple):
    """The tangent of each argument, None for zero. For a structured bias, it is the tangent of its table."""

    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None


class Results(NamedTuple):
    """The tangents of out and lse, and out itself before rounding to 16 bits; all in at least float32."""

    out: Array  # (…, H, n_q, d_v)
    out_dot: Array  # (…, H, n_q, d_v)
    lse_dot: Array  # (…, H, n_q)


class Operands(NamedTuple):
    """The rows of a tile of the inputs and tangents, in at least float32; k and v repeated for every query head."""

    q: Array
    k: Array
    v: Array
    q_dot: Array | None
    k_dot: Array | None
    v_dot: Array | None


class MovingScores(NamedTuple):
    """The weights of a tile, and the tangents of its scores."""

    weights: Array  # before dropout
    scores_dot: Array  # 0 where excluded
    capped: Array  # after scale and softcap; undefined where excluded
    capped_dot: Array
    allowed: Array | None


def jvp(
    q: Array, k: Array, v: Array, tangents: Tangents, out: Array, statistics: RowStatistics, problem: Problem
) -> Results:
    """Return the tangents of out and lse, from the ``(out, statistics)`` of any kernel."""
    if problem.sizes.empty:
        return jvp_of_rows(q, k, v, tangents, out, rows_of(problem, statistics), problem)

    def function(out: Array, rows: Rows) -> Results:
        return jvp_of_rows(q, k, v, tangents, out, rows, problem)

    return in_own_units(function, q, k, v, out, statistics, problem)


def in_own_units(
    function: Callable[[Array, Rows], Result], q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
    problem: Problem,
) -> Result:  # fmt: skip
    """Return ``function(out, rows)``, with out and the row statistics computed again where scores are large.

    Two kernels round a large score differently, and exp makes the difference a factor of every weight of a row.
    """
    xp = problem.xp
    q_, k_, v_ = (widen(xp, x) for x in (q, k, v))

    def careful() -> Result:
        units = row_units(q_, k_, problem)
        sums = tiled_sums(q, k, v, problem, units)
        largest, log_total = (xp.squeeze(x, axis=-1) for x in (sums.largest, xp.log(sums.total)))
        rows = Rows(largest, log_total, xp.zeros_like(largest), units)
        return function(sums.out / nonzero(xp, sums.total), rows)

    moderate = is_moderate(q_, k_, v_, statistics, problem)
    return problem.backend.cond(moderate, lambda: function(out, rows_of(problem, statistics)), careful)  # type: ignore[no-any-return]  # a backend is Any here


def rows_of(problem: Problem, statistics: RowStatistics) -> Rows:
    """Return the row statistics as ``Rows``, with a shift of zero."""
    return Rows(*statistics, problem.xp.zeros_like(statistics.largest))


def jvp_of_rows(
    q: Array, k: Array, v: Array, tangents: Tangents, out: Array, rows: Rows, problem: Problem
) -> Results:  # fmt: skip
    """Return the tangents of out and lse, computed from the row statistics in ``rows``."""
    xp, sizes = problem.xp, problem.sizes
    dtype, device, shape = wide(xp, q.dtype), problem.native_device, sizes.scores[:-1]
    out_dot = xp.zeros((*shape, sizes.d_v), dtype=dtype, device=device)
    lse_dot = xp.zeros(shape, dtype=dtype, device=device)
    again = None if dtype_name(out.dtype) == dtype_name(dtype) else xp.zeros_like(out_dot)  # out before rounding

    def body(carry: Any, tile: Tile, part: Problem) -> Any:
        out_dot, lse_dot, again = carry
        x = operands(q, k, v, tangents, tile, part)
        moving = moving_scores(x, bias_tangent(tangents.bias, problem, tile, part), rows_at(part, rows, tile), part)
        drop, shares = dropout_of(part), moving.weights * moving.scores_dot  # (…, H, n_q, n_k)
        weights = drop(moving.weights)
        out_dot_t = product_tangent(part.backend, (weights, x.v), (drop(shares), x.v_dot), moving.allowed)
        out_dot = add_at(part, out_dot, out_dot_t, (tile.query, None))
        lse_dot = add_at(part, lse_dot, xp.sum(shares, axis=-1), (None, tile.query))
        if again is not None:
            out_t = matmul_excluding(part.backend, weights, x.v, moving.allowed)
            again = add_at(part, again, out_t, (tile.query, None))
        return out_dot, lse_dot, again

    if not sizes.empty:
        out_dot, lse_dot, again = over_tiles(problem, body, (out_dot, lse_dot, again))
    if tangents.sinks is not None:
        weights = sink_weights(rows.largest, rows.log_total, problem, rows.units)
        lse_dot = lse_dot + cast(xp, weights * sinks_tangent(tangents.sinks, problem), dtype)
    out = out if again is None else again
    return Results(out, out_dot - lse_dot[..., None] * out, lse_dot)


def operands(q: Array, k: Array, v: Array, tangents: Tangents, tile: Tile, part: Problem) -> Operands:
    """Slice the rows of a tile from the inputs and their tangents."""

    def of_queries(x: Array | None) -> Any:
        return None if x is None else widen(part.xp, cut(part, x, tile.query, part.sizes.n_q, -2))

    def of_keys(x: Array | None) -> Any:
        return None if x is None else repeat_heads(widen(part.xp, cut(part, x, tile.key, part.sizes.n_k, -2)), part)

    moved = of_queries(tangents.q), of_keys(tangents.k), of_keys(tangents.v)
    return Operands(of_queries(q), of_keys(k), of_keys(v), *moved)


def moving_scores(x: Operands, bias_dot: Array | None, rows: Rows, part: Problem) -> MovingScores:
    """Return the weights of a tile, and the tangent of its scores."""
    xp = part.xp
    found = attention_scores(x.q, x.k, part, rows.units)  # (…, H, n_q, n_k)
    weights = normalised(found, rows.largest, rows.log_total, part)
    capped, allowed = found.capped, found.allowed
    capped_dot = xp.zeros_like(capped)
    if x.q_dot is not None:
        capped_dot = capped_dot + xp.matmul(x.q_dot, xp.matrix_transpose(x.k))
    if x.k_dot is not None:
        capped_dot = capped_dot + xp.matmul(x.q, xp.matrix_transpose(x.k_dot))
    capped_dot = capped_dot * part.scale
    if part.softcap is not None:
        capped_dot = capped_dot * (1 - (capped / part.softcap) ** 2)
    scores_dot = capped_dot if bias_dot is None else capped_dot + cast(xp, bias_dot, capped.dtype)
    return MovingScores(weights, only(scores_dot, allowed, part), capped, capped_dot, allowed)


def product_tangent(
    backend: Any, factors: tuple[Array, Array], moved: tuple[Array, Array | None], allowed: Array | None
) -> Array:
    """Return (a b)' = a' b + a b' over the allowed pairs; b' may be None, which means zero."""
    (a, b), (a_dot, b_dot) = factors, moved
    first = matmul_excluding(backend, a_dot, b, allowed)
    return first if b_dot is None else first + matmul_excluding(backend, a, b_dot, allowed)


def bias_tangent(tangent: Array | None, problem: Problem, tile: Tile, part: Problem) -> Array | None:
    """Return the tangent of the bias of a tile; for a structured bias, from the tangent of its table."""
    if tangent is None:
        return None
    of_table = isinstance(problem.bias, StructuredBias)
    moved = replace(problem, **{"table" if of_table else "bias": tangent}, mask=None, q_segments=None, k_segments=None)
    return bias_pairs(part_of(moved, tile, Loop(part.sizes.n_q, part.sizes.n_k, True, ())))


def dropout_of(part: Problem) -> Callable[[Array], Array]:
    """Return the inverted dropout of a tile as a function; the keep mask is computed once."""
    xp = part.xp
    if part.dropout == 0:
        return lambda x: x
    if part.dropout == 1:
        return lambda x: xp.zeros_like(x)
    keep = keep_mask(part)
    return lambda x: xp.where(keep, x / (1 - part.dropout), xp.zeros_like(x))


def only(x: Array, allowed: Array | None, problem: Problem) -> Array:
    """Return ``x`` where a pair is allowed, and 0 where it is excluded."""
    return x if allowed is None else problem.xp.where(allowed, x, problem.xp.zeros_like(x))


def sinks_tangent(tangent: Array, problem: Problem) -> Array:
    """Return the tangent of the sinks, ``(H, 1)``; 0 for a sink of −inf, which is no sink."""
    xp = problem.xp
    none = xp.equal(problem.sinks, -math.inf)
    return widen(xp, xp.where(none, xp.zeros_like(tangent), tangent))[:, None]
