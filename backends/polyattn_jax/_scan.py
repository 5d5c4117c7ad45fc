"""Attention as a compiled loop over query tiles, and for each over key tiles, forward and backward.

Rabe and Staats, "Self-attention does not need O(n²) memory" (2021); Dao et al., "FlashAttention" (2022).
The bounds of the loop over the keys are computed, so one program is compiled for all offsets and lengths.

In comments on shapes, n_q and n_k are lengths of a tile, and heads is the number of key heads that are computed
together. The rows of a key head are the queries of all its query heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics

from ._operands import Operands, mapped_over_heads, operands, wide, with_axes
from ._placed import branched
from ._tiles import Allowed, QueryTile, loop, put, take, tiles_of
from ._units import in_gradient_units, in_units, is_moderate

__all__ = ["backward", "forward"]


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return ``(out, statistics)`` as the kernel contract defines them."""
    return of_kernel(q, problem, _forward(operands(q, k, v, problem)))


def of_kernel(q: Array, problem: Problem, results: tuple[Array, ...]) -> tuple[Array, RowStatistics]:
    """Reshape results by head (out, largest score, logarithm of the total) as the kernel contract defines them."""
    out, *statistics = results
    rows = problem.sizes.scores[:-1]
    return out.reshape(*rows, -1).astype(q.dtype), RowStatistics(*(y.reshape(rows) for y in statistics))


def backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
    problem: Problem,
) -> AttentionGrads:  # fmt: skip
    """Return the gradients as the kernel contract defines them."""
    batch, heads, kv_heads, *_ = problem.sizes
    rows = (math.prod(batch) * heads, problem.sizes.n_q)
    dout, out = (y.reshape(*rows, -1) for y in (dout, out))
    x = in_gradient_units(operands(q, k, v, problem), dout)
    unit = jnp.repeat(x.value_units, x.shared, axis=0)[:, None, :]  # (h, 1, 2)

    def given() -> tuple[Array, Array, Array]:
        empty = jnp.all(out == 0, axis=-1)  # a NaN in dout of an empty row must not reach the sinks
        mean = jnp.where(empty, 0, jnp.sum(wide(dout) * divided(wide(out), unit[:, :, None, :]), axis=-1))
        return *(wide(y).reshape(rows) for y in statistics), mean

    def own() -> tuple[Array, Array, Array]:
        return _statistics(x, dout)  # type: ignore[no-any-return]  # JAX is Any to the type checker

    largest, log_total, mean = branched(is_moderate(q, k, problem.scale, statistics.largest), given, own)
    log_total = jnp.where(log_total == -jnp.inf, 0, log_total)
    shift = -mean  # (h, n_q)
    if dlse is not None:
        shift = shift + divided(wide(dlse).reshape(rows), unit)
    dsinks = None
    if x.sinks is not None and problem.sinks is not None:
        up = units_of(x, x.units[:, :, None, :])
        sinks = x.sinks[:, None].astype(shift.dtype)
        weights = jnp.exp(multiplied(divided(sinks[..., None], up) - largest[..., None], up)[..., 0] - log_total)
        moved = multiplied(weights * shift, unit).reshape(*batch, heads, -1)
        dsinks = jnp.sum(moved, axis=(*range(len(batch)), -1)).astype(problem.sinks.dtype)  # (H,)
    dq, dk, dv = _backward(x, dout, largest, log_total, shift)
    dk, dv = (with_axes(dx, x, (*batch, kv_heads)) for dx, x in ((dk, k), (dv, v)))
    return AttentionGrads(with_axes(dq, q, (*batch, heads)), dk, dv, None, dsinks)


@mapped_over_heads
def _forward(x: Operands) -> tuple[Array, Array, Array]:
    """Return out ``(h, n_q, d_v)``, the largest score and the logarithm of the total, both ``(h, n_q)``.

    The direct kernel calls this for few rows if its result is not finite. XLA reserves memory for this branch in every
    call, so the tiles of few rows are small.
    """
    x, tiles, finite = in_units(x), tiles_of(x, small=True), _finite(x.v)
    (h, n_q, _), d_v, dtype = x.q.shape, x.v.shape[2], wide(x.q).dtype

    def one(i: Any, results: Any) -> Any:
        head, number = i // tiles.queries.tiles * tiles.heads, i % tiles.queries.tiles
        tile = QueryTile(x, tiles, head, number)
        parts = (tile.by_query_head(part) for part in _forward_tile(tile, finite))
        return tuple(put(y, part, tile.at) for y, part in zip(results, parts, strict=True))

    results = (jnp.zeros((h, n_q, d_v), x.q.dtype), jnp.zeros((h, n_q), dtype), jnp.zeros((h, n_q), dtype))
    out, largest, log_total = loop(len(x.k) // tiles.heads * tiles.queries.tiles, one, results)
    return out, largest, log_total


def _forward_tile(tile: QueryTile, finite: Array) -> tuple[Array, Array, Array]:
    """Return out ``(heads, rows, d_v)``, the largest score and the logarithm of the total, both ``(heads, rows)``."""
    value_unit, up = tile.value_unit, units_of(tile.x, tile.rows(tile.x.units)[..., None, :])

    def add(weights: Array, j: Any, allowed: Allowed) -> Array:
        return _over_keys(weights, divided(tile.keys(j)[1], value_unit), allowed, finite)  # (heads, rows, d_v)

    out, total, largest, some = _sums(tile, tile.x.v.shape[2], add)
    total = jnp.where(some & (total == 0), jnp.nan, total)  # all scores are −inf, although a pair is allowed
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    return (
        multiplied(out / jnp.where(total == 0, 1, total)[..., None], value_unit),
        multiplied(largest[..., None], up)[..., 0], jnp.log(total),
    )  # fmt: skip


def _sums(tile: QueryTile, features: int, add: Callable[[Array, Any, Allowed], Array]) -> tuple[Array, ...]:
    """Return Σ ``add(exp(score), key tile)``, Σ exp(score), the largest score in units, and if any pair is allowed."""
    x, units = tile.x, tile.rows(tile.x.units)
    q, up = divided(tile.rows(x.q) * x.scale, units[..., None, :]), units_of(x, units[..., None, :])  # (heads, rows, ·)

    def body(j: Any, carry: Any, allowed: Allowed) -> Any:
        out, total, largest, some = carry
        scores = _softcapped(products(q, tile.keys(j)[0]), x, units[..., None, :])  # (heads, rows, n_k)
        if allowed is not None:
            scores = jnp.where(allowed(), scores, -jnp.inf)
        before, largest = largest, jnp.maximum(largest, jnp.max(scores, axis=-1))
        base = jnp.where(largest == -jnp.inf, 0, largest)
        weights = jnp.exp(multiplied(scores - base[..., None], up))
        rescale = jnp.exp(multiplied((before - base)[..., None], up))
        some = jnp.ones_like(some) if allowed is None else some | jnp.any(allowed(), axis=-1)
        out, total = out * rescale + add(weights, j, allowed), total * rescale[..., 0] + jnp.sum(weights, axis=-1)
        return out, total, largest, some

    return tile.over_keys(body, _no_keys(tile, q, up, features))  # type: ignore[no-any-return]  # JAX is Any to the type checker


def _no_keys(tile: QueryTile, q: Array, up: Any, features: int) -> tuple[Array, Array, Array, Array]:
    """Return the initial values of the results of :func:`_sums`: zeros, or those of the sinks."""
    x, rows = tile.x, q.shape[:2]
    out, some = jnp.zeros((*rows, features), q.dtype), jnp.zeros(rows, bool)
    if x.sinks is None:
        return out, jnp.zeros(rows, q.dtype), jnp.full(rows, -jnp.inf, q.dtype), some
    sinks = take(x.sinks, tile.at[:1], (tile.tiles.heads * x.shared,)).reshape(-1, x.shared)
    sinks = jnp.repeat(sinks, tile.tiles.queries.length, axis=1).astype(q.dtype)  # (heads, rows)
    return out, jnp.where(sinks == -jnp.inf, 0, jnp.ones_like(sinks)), divided(sinks[..., None], up)[..., 0], some


@mapped_over_heads
def _statistics(x: Operands, dout: Array) -> tuple[Array, Array, Array]:
    """Return for each row the largest score in units, the logarithm of the total, and rowsum(weights · dweights).

    Here and in :func:`_backward`, ``x`` must have its units.
    """
    tiles, dtype = tiles_of(x), wide(x.q).dtype

    def one(i: Any, results: Any) -> Any:
        head, number = i // tiles.queries.tiles * tiles.heads, i % tiles.queries.tiles
        tile = QueryTile(x, tiles, head, number)
        dout_t = tile.rows(dout)

        def add(weights: Array, j: Any, allowed: Allowed) -> Array:
            dweights = _dot(dout_t, divided(tile.keys(j)[1], tile.value_unit), (2, 2))
            return jnp.sum(jnp.where(weights == 0, 0, weights * dweights), axis=-1, keepdims=True)

        mean, total, largest, _ = _sums(tile, 1, add)
        mean = mean[..., 0] / jnp.where(total == 0, 1, total)
        parts = (jnp.where(largest == -jnp.inf, 0, largest), jnp.log(total), mean)
        return tuple(put(y, tile.by_query_head(part), tile.at) for y, part in zip(results, parts, strict=True))

    results = tuple(jnp.zeros(x.q.shape[:2], dtype) for _ in range(3))
    largest, log_total, mean = loop(len(x.k) // tiles.heads * tiles.queries.tiles, one, results)
    return largest, log_total, mean


@mapped_over_heads
def _backward(x: Operands, dout: Array, largest: Array, log_total: Array, shift: Array) -> tuple[Array, Array, Array]:
    """Return dq ``(h, n_q, d_k)``, dk and dv, in float32 at least.

    ``shift (h, n_q)`` is dlse − rowsum(dout · out), divided by the units of the values.
    """
    tiles, finite = tiles_of(x), _finite(x.q, x.k, dout)
    upstream = (dout, largest, log_total, shift)

    def one(i: Any, results: Any) -> Any:
        head = i * tiles.heads

        def queries(number: Any, carry: Any) -> Any:
            return _backward_tile(QueryTile(x, tiles, head, number, once=True), upstream, finite, carry)

        dq, dk, dv = results
        (_, n_k, d_k), d_v = x.k.shape, x.v.shape[2]
        dq, dkv_t = loop(tiles.queries.tiles, queries, (dq, jnp.zeros((tiles.heads, d_k + d_v, n_k), wide(x.k).dtype)))
        dkv = dkv_t.swapaxes(1, 2)  # (heads, n_k, d_k + d_v)
        unit = take(x.value_units, (head,), (tiles.heads,))[:, None, None, :]
        return dq, put(dk, multiplied(dkv[..., :d_k], unit), (head,)), put(dv, dkv[..., d_k:], (head,))

    results = tuple(jnp.zeros_like(y, dtype=wide(y).dtype) for y in (x.q, x.k, x.v))
    dq, dk, dv = loop(len(x.k) // tiles.heads, one, results)
    return dq, dk, dv


def _backward_tile(tile: QueryTile, upstream: tuple[Array, ...], finite: Array, carry: Any) -> tuple[Array, Array]:
    """Add the part of a query tile to dq ``(h, n_q, d_k)``, and to dk and dv, joined as ``(heads, d_k + d_v, n_k)``.

    If dk and dv were separate, XLA would swap the operands of the products to save a transpose. That halves their
    speed, and aborts the process for an axis of length 2 or 3 (jaxlib 0.10, CPU).
    """
    x, (q, units, dout, largest, log_total, shift) = tile.x, (tile.rows(y) for y in (tile.x.q, tile.x.units, *upstream))
    units = units[..., None, :]
    q, up = q * x.scale, units_of(x, units)
    in_units = divided(q, units)
    # Each product below contracts an axis that is contiguous in memory, so XLA transposes no operand.
    q_t, dout_t = q.swapaxes(1, 2), dout.swapaxes(1, 2)

    def body(j: Any, carry: Any, allowed: Allowed) -> Any:
        dq, dkv_t = carry
        k, v = tile.keys(j)
        v = divided(v, tile.value_unit)
        scores = _softcapped(products(in_units, k), x, units)  # (heads, rows, n_k)
        weights = jnp.exp(multiplied(scores - largest[..., None], up) - log_total[..., None])
        dscores = weights * (_dot(dout, v, (2, 2)) + shift[..., None])
        if x.softcap is not None:
            dscores = dscores * (1 - (scores / x.softcap) ** 2)
        if allowed is not None:
            weights, dscores = (jnp.where(allowed(), y, 0) for y in (weights, dscores))
        parts = (_over_rows(q_t, dscores, allowed, finite), _over_rows(dout_t, weights, allowed, finite))
        dkv_t = _add(dkv_t, jnp.concatenate(parts, axis=1), tile.tiles.keys.start(j))
        return dq + _over_keys(dscores, k, allowed, finite), dkv_t

    dq, dkv_t = carry
    part, dkv_t = tile.over_keys(body, (jnp.zeros_like(q), dkv_t))
    part = tile.by_query_head(multiplied(part * x.scale, tile.value_unit))
    if tile.tiles.queries.overlaps:
        part = part + take(dq, tile.at, part.shape[:2])
    return put(dq, part, tile.at), dkv_t


def multiplied(x: Array, units: Any) -> Array:
    """Return ``x`` times the units of its rows, two factors on the last axis; None means 1."""
    return x if units is None else x * units[..., 0] * units[..., 1]


def divided(x: Array, units: Any) -> Array:
    """Return ``x`` divided by the units of its rows."""
    return x if units is None else x / units[..., 0] / units[..., 1]


def units_of(x: Operands, units: Array) -> Array | None:
    """Return the units of the scores: None with a softcap, which bounds the scores."""
    return units if x.softcap is None else None


def _over_keys(scores: Array, x: Array, allowed: Allowed, finite: Array) -> Array:
    """Return ``scores (heads, rows, n_k) @ x (heads, n_k, d)``."""
    if allowed is None:
        return _dot(scores, x, (2, 1))
    return lax.cond(
        finite,
        lambda: _dot(scores, x, (2, 1)),
        lambda: _isolated(x.swapaxes(1, 2), scores.swapaxes(1, 2), allowed().swapaxes(1, 2)).swapaxes(1, 2),
    )


def _over_rows(x_t: Array, scores: Array, allowed: Allowed, finite: Array) -> Array:
    """Return ``x_t (heads, d, rows) @ scores (heads, rows, n_k)``."""
    if allowed is None:
        return _dot(x_t, scores, (2, 1))
    return lax.cond(finite, lambda: _dot(x_t, scores, (2, 1)), lambda: _isolated(x_t, scores, allowed()))


def _isolated(x: Array, scores: Array, allowed: Array) -> Array:
    """Return ``x (heads, d, m) @ scores (heads, m, n)``; NaN and infinity in ``x`` count for allowed pairs only.

    The score of an excluded pair is 0, but 0 times NaN is NaN. So columns of ``x`` that are not finite are added one
    by one.
    """
    allowed = jnp.broadcast_to(allowed, scores.shape)  # (heads, m, n)
    fault = jnp.any(~jnp.isfinite(x), axis=(0, 1))  # (m,)
    faults_first = jnp.argsort(~fault)

    def add(i: Any, total: Array) -> Array:
        entry, line, counts = (
            lax.dynamic_slice_in_dim(y, faults_first[i], 1, axis) for y, axis in ((x, 2), (scores, 1), (allowed, 1))
        )  # (heads, d, 1), (heads, 1, n), (heads, 1, n)
        return total + jnp.where(counts, entry * line, 0)

    total = _dot(jnp.where(fault, 0, x), scores, (2, 1))  # (heads, d, n)
    return lax.fori_loop(np.int32(0), jnp.sum(fault, dtype=np.int32), add, total)


def products(a: Array, b: Array) -> Array:
    """Return a bᵀ for each head.

    XLA would fuse a product over one feature with each of its uses, and compute it again in each, with different
    rounding errors, which are large for large scores. So a second feature of zeros is appended.
    """
    if a.shape[2] == 1:
        a, b = (jnp.pad(y, ((0, 0), (0, 0), (0, 1))) for y in (a, b))
    return _dot(a, b, (2, 2))


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Contract one axis of each array, for each head."""
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((0,), (0,))))


def _softcapped(scores: Array, x: Operands, units: Array) -> Array:
    """Return scores after the softcap, if there is one."""
    return scores if x.softcap is None else jnp.tanh(multiplied(scores, units) / x.softcap) * x.softcap


def _finite(*arrays: Array) -> Array:
    """Return whether the sum of all entries is finite, which implies that all entries are."""
    return jnp.isfinite(sum(jnp.sum(wide(x)) for x in arrays))


def _add(total: Array, part: Array, start: Any) -> Array:
    """Return the total with a part added along the last axis, from ``start``."""
    here = lax.dynamic_slice_in_dim(total, start, part.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, here + part, start, axis=2)
