"""Attention as a compiled loop over tiles of queries, and for each over tiles of keys, forward and backward.

Rabe and Staats, "Self-attention does not need O(n²) memory" (2021); Dao et al., "FlashAttention" (2022).
Where the loop over the keys begins and ends is computed, so one program serves every offset and length.

In a comment on a shape, n_q and n_k are those of a tile, and heads the key heads that are computed together;
rows are the queries of a tile, once for each query head that reads a key head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from polyattn.backend import Array, Problem, RowStatistics, statistics_of_lse

from ._operands import Operands, mapped_over_heads, operands, wide, with_axes
from ._tiles import Allowed, QueryTile, loop, put, take, tiles_of

__all__ = ["backward", "forward"]


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return ``(out, statistics)`` as the kernel contract has them."""
    out, lse = _forward(operands(q, k, v, problem))
    rows = problem.sizes.scores[:-1]
    return out.reshape(*rows, -1).astype(q.dtype), statistics_of_lse(jnp, lse.reshape(rows))


def backward(
    dout: Array,
    dlse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    statistics: RowStatistics,
    problem: Problem,
) -> tuple[Array, Array, Array, None, Array | None]:
    """Return the gradients as the kernel contract has them."""
    batch, heads, kv_heads, *_ = problem.sizes
    empty = jnp.all(out == 0, axis=-1)  # such a row's upstream, NaN or not, moves no sink
    shift = jnp.where(empty, 0, -jnp.sum(wide(dout) * wide(out), axis=-1))  # (…, H, n_q)
    if dlse is not None:
        shift = shift + wide(dlse)
    lse = statistics.lse
    lse = wide(jnp.where(lse == -jnp.inf, 0, lse))
    dsinks = None
    if problem.sinks is not None:
        weights = jnp.exp(wide(problem.sinks)[:, None] - lse)
        dsinks = jnp.sum(weights * shift, axis=(*range(len(batch)), -1)).astype(problem.sinks.dtype)  # (H,)
    dout, lse, shift = (x.reshape(-1, *x.shape[len(batch) + 1 :]) for x in (dout, lse, shift))
    dq, dk, dv = _backward(operands(q, k, v, problem), dout, lse, shift)
    dk, dv = (with_axes(dx, x, (*batch, kv_heads)) for dx, x in ((dk, k), (dv, v)))
    return with_axes(dq, q, (*batch, heads)), dk, dv, None, dsinks


@mapped_over_heads
def _forward(x: Operands) -> tuple[Array, Array]:
    """Return out ``(h, n_q, d_v)`` and lse ``(h, n_q)``."""
    tiles, finite = tiles_of(x), _finite(x.v)
    (h, n_q, _), d_v = x.q.shape, x.v.shape[2]

    def one(i: Any, results: Any) -> Any:
        head, number = i // tiles.queries.tiles * tiles.heads, i % tiles.queries.tiles
        tile = QueryTile(x, tiles, head, number)
        parts = (tile.by_query_head(part) for part in _forward_tile(tile, finite))
        return tuple(put(y, part, tile.at) for y, part in zip(results, parts, strict=True))

    results = (jnp.zeros((h, n_q, d_v), x.q.dtype), jnp.zeros((h, n_q), wide(x.q).dtype))
    out, lse = loop(len(x.k) // tiles.heads * tiles.queries.tiles, one, results)
    return out, lse


def _forward_tile(tile: QueryTile, finite: Array) -> tuple[Array, Array]:
    """Return out ``(heads, rows, d_v)``, divided once, and lse ``(heads, rows)``."""
    q = tile.rows(tile.x.q) * tile.x.scale  # (heads, rows, d_k)

    def body(j: Any, carry: Any, allowed: Allowed) -> Any:
        out, total, largest, some = carry
        k, v = tile.keys(j)
        scores = _softcapped(_dot(q, k, (2, 2)), tile.x)  # (heads, rows, n_k)
        if allowed is not None:
            scores = jnp.where(allowed(), scores, -jnp.inf)
        before, largest = largest, jnp.maximum(largest, jnp.max(scores, axis=-1))
        base = jnp.where(largest == -jnp.inf, 0, largest)
        weights, rescale = jnp.exp(scores - base[..., None]), jnp.exp(before - base)
        some = jnp.ones_like(some) if allowed is None else some | jnp.any(allowed(), axis=-1)
        part = _over_keys(weights, v, allowed, finite)  # (heads, rows, d_v)
        return out * rescale[..., None] + part, total * rescale + jnp.sum(weights, axis=-1), largest, some

    out, total, largest, some = tile.over_keys(body, _no_keys(tile, q))
    total = jnp.where(some & (total == 0), jnp.nan, total)  # all scores are −inf, and not by exclusion
    lse = jnp.log(total) + jnp.where(largest == -jnp.inf, 0, largest)
    return out / jnp.where(total == 0, 1, total)[..., None], lse


def _no_keys(tile: QueryTile, q: Array) -> tuple[Array, Array, Array, Array]:
    """Return Σ exp(score) v, Σ exp(score), the largest score, and whether there was one, before any key."""
    x, rows = tile.x, q.shape[:2]
    out, some = jnp.zeros((*rows, x.v.shape[2]), q.dtype), jnp.zeros(rows, bool)
    if x.sinks is None:
        return out, jnp.zeros(rows, q.dtype), jnp.full(rows, -jnp.inf, q.dtype), some
    sinks = take(x.sinks, tile.at[:1], (tile.tiles.heads * x.shared,)).reshape(-1, x.shared)
    sinks = jnp.repeat(sinks, tile.tiles.queries.length, axis=1).astype(q.dtype)  # (heads, rows)
    return out, jnp.where(sinks == -jnp.inf, 0, jnp.ones_like(sinks)), sinks, some


@mapped_over_heads
def _backward(x: Operands, dout: Array, lse: Array, shift: Array) -> tuple[Array, Array, Array]:
    """Return dq ``(h, n_q, d_k)``, dk and dv; ``shift (h, n_q)`` is dlse − rowsum(dout · out)."""
    tiles, finite = tiles_of(x), _finite(x.q, x.k, dout)

    def one(i: Any, results: Any) -> Any:
        head = i * tiles.heads

        def queries(number: Any, carry: Any) -> Any:
            return _backward_tile(QueryTile(x, tiles, head, number, once=True), (dout, lse, shift), finite, carry)

        dq, dk, dv = results
        (_, n_k, d_k), d_v = x.k.shape, x.v.shape[2]
        dq, dkv_t = loop(tiles.queries.tiles, queries, (dq, jnp.zeros((tiles.heads, d_k + d_v, n_k), wide(x.k).dtype)))
        dkv = dkv_t.swapaxes(1, 2)  # (heads, n_k, d_k + d_v)
        return dq, put(dk, dkv[..., :d_k], (head,)), put(dv, dkv[..., d_k:], (head,))

    dq, dk, dv = loop(len(x.k) // tiles.heads, one, tuple(jnp.zeros_like(y) for y in (x.q, x.k, x.v)))
    return dq, dk, dv


def _backward_tile(tile: QueryTile, upstream: tuple[Array, ...], finite: Array, carry: Any) -> tuple[Array, Array]:
    """Add a query tile to dq ``(h, n_q, d_k)``, and to dk and dv, one above the other: ``(heads, d_k + d_v, n_k)``.

    Apart, XLA would exchange a product's operands for the transpose that follows. That halves its rate,
    and where an axis is two or three long ends the process (jaxlib 0.10, CPU).
    """
    x, (q, dout, lse, shift) = tile.x, (tile.rows(y) for y in (tile.x.q, *upstream))
    q = q * x.scale
    # Each of the products below runs over rows or keys that lie side by side: none has to be transposed.
    q_t, dout_t = q.swapaxes(1, 2), dout.swapaxes(1, 2)

    def body(j: Any, carry: Any, allowed: Allowed) -> Any:
        dq, dkv_t = carry
        k, v = tile.keys(j)
        scores = _softcapped(_dot(q, k, (2, 2)), x)  # (heads, rows, n_k)
        weights = jnp.exp(scores - lse[..., None])
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
    part = tile.by_query_head(part * x.scale)
    if tile.tiles.queries.overlaps:
        part = part + take(dq, tile.at, part.shape[:2])
    return put(dq, part, tile.at), dkv_t


def _over_keys(scores: Array, x: Array, allowed: Allowed, finite: Array) -> Array:
    """Return Σ scores x over the keys, which ``x (heads, n_k, d)`` has as rows: ``(heads, rows, d)``."""
    if allowed is None:
        return _dot(scores, x, (2, 1))
    return lax.cond(
        finite,
        lambda: _dot(scores, x, (2, 1)),
        lambda: _isolated(x.swapaxes(1, 2), scores.swapaxes(1, 2), allowed().swapaxes(1, 2)).swapaxes(1, 2),
    )


def _over_rows(x_t: Array, scores: Array, allowed: Allowed, finite: Array) -> Array:
    """Return Σ x scores over the rows, which ``x_t (heads, d, rows)`` has as columns: ``(heads, d, n_k)``."""
    if allowed is None:
        return _dot(x_t, scores, (2, 1))
    return lax.cond(finite, lambda: _dot(x_t, scores, (2, 1)), lambda: _isolated(x_t, scores, allowed()))


def _isolated(x: Array, scores: Array, allowed: Array) -> Array:
    """Return ``x scores``, where what is not finite in ``x (heads, d, m)`` counts only for pairs that are allowed.

    A score that is excluded is zero, but zero times NaN is not: such entries are added one by one.
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


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Contract one axis of each, head by head."""
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((0,), (0,))))


def _softcapped(scores: Array, x: Operands) -> Array:
    return scores if x.softcap is None else jnp.tanh(scores / x.softcap) * x.softcap


def _finite(*arrays: Array) -> Array:
    """Return True where all entries are finite; where their sum is not it may be False."""
    return jnp.isfinite(sum(jnp.sum(wide(x)) for x in arrays))


def _add(total: Array, part: Array, start: Any) -> Array:
    """Return the total with a part added from ``start`` on along the last axis."""
    here = lax.dynamic_slice_in_dim(total, start, part.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, here + part, start, axis=2)
