"""Attention of few queries, all scores at once, where keys and values are read as they lie.

Vaswani et al., "Attention is all you need" (2017), equation 1. Scores lie with the keys before the rows: both
products then run over keys and values in their own order. The other way round XLA would turn the keys first,
a copy as large as they are for each token.

In a comment on a shape, u are the key heads, and rows the queries, once for each query head that reads a key head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from polyattn.backend import Array, Problem, RowStatistics, statistics_of_lse

from ._operands import Operands, mapped_over_heads, operands, wide
from ._scan import backward
from ._tiles import QueryTile, Span, Tiles

__all__ = ["backward", "forward"]


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return ``(out, statistics)`` as the kernel contract has them."""
    out, lse = _forward(operands(q, k, v, problem))
    rows = problem.sizes.scores[:-1]
    return out.reshape(*rows, -1).astype(q.dtype), statistics_of_lse(jnp, lse.reshape(rows))


@mapped_over_heads
def _forward(x: Operands) -> tuple[Array, Array]:
    """Return out ``(h, n_q, d_v)`` and lse ``(h, n_q)``."""
    n_q, (u, n_k, _) = x.q.shape[1], x.k.shape
    tile = QueryTile(x, Tiles(Span(n_q, n_q), Span(n_k, n_k), u), 0, 0)
    q, v = tile.rows(x.q) * x.scale, wide(x.v)  # (u, rows, d_k), (u, n_k, d_v)
    scores = _dot(wide(x.k), q, (2, 2))  # (u, n_k, rows)
    if x.softcap is not None:
        scores = jnp.tanh(scores / x.softcap) * x.softcap
    allowed = tile.allowed(0).swapaxes(1, 2) if tile.excluding else None  # (1 or u, n_k, 1 or rows)
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    largest = jnp.max(scores, axis=1)  # (u, rows)
    sinks = None if x.sinks is None else jnp.repeat(wide(x.sinks), n_q).reshape(u, -1).astype(q.dtype)
    if sinks is not None:
        largest = jnp.maximum(largest, sinks)
    base = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(scores - base[:, None])  # (u, n_k, rows)
    total = jnp.sum(weights, axis=1)  # (u, rows)
    if sinks is not None:
        total = total + jnp.exp(sinks - base)
    out = _dot(weights, v, (1, 1))  # (u, rows, d_v)
    some: Any = True
    if allowed is not None:
        out = lax.cond(jnp.isfinite(jnp.sum(out)), lambda: out, lambda: _isolated(weights, v, allowed))
        some = jnp.any(allowed, axis=1)
    total = jnp.where(some & (total == 0), jnp.nan, total)  # all scores are −inf, and not by exclusion
    out = out / jnp.where(total == 0, 1, total)[..., None]
    return tile.by_query_head(out), tile.by_query_head(jnp.log(total) + base)


def _isolated(weights: Array, v: Array, allowed: Array) -> Array:
    """Return Σ weights v over the keys that are allowed, whatever stands at the others: ``(u, rows, d_v)``.

    Key by key, so that it needs no memory: XLA sets it aside for a branch that is not taken, too.
    """
    allowed = jnp.broadcast_to(allowed, weights.shape)

    def add(i: Any, total: Array) -> Array:
        weight, value, counts = (lax.dynamic_index_in_dim(y, i, 1, keepdims=False) for y in (weights, v, allowed))
        return total + jnp.where(counts[..., None], weight[..., None] * value[:, None, :], 0)

    (u, n_k, rows), d_v = weights.shape, v.shape[2]
    return lax.fori_loop(np.int32(0), np.int32(n_k), add, jnp.zeros((u, rows, d_v), v.dtype))


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Contract one axis of each, head by head."""
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((0,), (0,))))
