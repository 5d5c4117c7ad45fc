"""Attention of few queries, with all scores at once and without a copy of the keys and values.

Vaswani et al., "Attention is all you need" (2017), equation 1. The scores are stored with the key axis before the
row axis, so that both products read keys and values in their memory order. With the row axis first, XLA would
transpose the keys, which copies all of them for each token.

In comments on shapes, u is the number of key heads. The rows of a key head are the queries of all its query heads.
"""

from __future__ import annotations

from jax import lax
from jax import numpy as jnp

from polyattn.backend import Array, Problem, RowStatistics

from ._operands import Operands, mapped_over_heads, operands, wide
from ._placed import branched
from ._scan import _forward as scan_forward
from ._scan import backward, of_kernel, products
from ._tiles import QueryTile, Span, Tiles

__all__ = ["backward", "forward"]


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return ``(out, statistics)`` as the kernel contract defines them."""
    return of_kernel(q, problem, _forward(operands(q, k, v, problem)))


@mapped_over_heads
def _forward(x: Operands) -> tuple[Array, Array, Array]:
    """Return out ``(h, n_q, d_v)``, the largest score and the logarithm of the total, both ``(h, n_q)``.

    If a product overflows, or an input is NaN or infinite, the scan computes the problem. To test all keys and values
    before the products, as the scan does, would take as long as the products.
    """
    *results, fits = _ordinary(x)
    return branched(fits, lambda: tuple(results), lambda: scan_forward(x))  # type: ignore[no-any-return]  # JAX is Any to the type checker


def _ordinary(x: Operands) -> tuple[Array, ...]:
    """Return the three results, and whether scores and out are finite."""
    n_q, (u, n_k, _) = x.q.shape[1], x.k.shape
    tile = QueryTile(x, Tiles(Span(n_q, n_q), Span(n_k, n_k), u), 0, 0)
    q, v = tile.rows(x.q) * x.scale, wide(x.v)  # (u, rows, d_k), (u, n_k, d_v)
    scores = products(wide(x.k), q)  # (u, n_k, rows)
    fits = jnp.min(scores) > -jnp.inf
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
    some = True if allowed is None else jnp.any(allowed, axis=1)
    total = jnp.where(some & (total == 0), jnp.nan, total)  # all scores are −inf, although a pair is allowed
    out = out / jnp.where(total == 0, 1, total)[..., None]
    fits = fits & jnp.isfinite(jnp.sum(out))
    results = (out.astype(x.q.dtype), base, jnp.log(total))
    return *(tile.by_query_head(y) for y in results), fits


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Contract one axis of each array, for each head."""
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((0,), (0,))))
