"""Powers of two that divide scores, values and gradients to prevent overflow; 1 for ordinary inputs.

``polyattn.kernels._units`` explains them. The kernels here always multiply by them, which costs less than to compile
a second program for each shape. Only the computation of the units is conditional.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax import lax
from jax import numpy as jnp

from polyattn.backend import Array

from ._operands import Operands, wide
from ._placed import branched

__all__ = ["LARGE", "in_gradient_units", "in_units", "is_moderate"]

LARGE = 32.0
"""Rounding errors of scores up to this value are so small that forward and backward may compute them differently."""


def in_units(x: Operands) -> Operands:
    """Return the operands with units in which neither a score nor a sum of values overflows."""
    ordinary = are_ordinary(x.scale, x.q, x.k, x.v)
    return _with_units(x, ordinary, lambda: value_units(x.v, math.log2(max(x.v.shape[1], 1)), 3))


def in_gradient_units(x: Operands, dout: Array) -> Operands:
    """Return the operands with units in which no product of values with dout ``(h, n_q, d_v)`` overflows."""
    ordinary = are_ordinary(x.scale, x.q, x.k, x.v, dout)

    def found() -> Array:
        of_dout = jnp.max(log2_magnitude(dout, (1, 2)).reshape(len(x.v), -1), axis=1)  # (u,)
        return value_units(x.v, of_dout + math.log2(max(x.v.shape[2], 1)), 8)

    return _with_units(x, ordinary, found)


def _with_units(x: Operands, ordinary: Array, of_values: Callable[[], Array]) -> Operands:
    def ones() -> tuple[Array, Array]:
        dtype = wide(x.q).dtype
        return jnp.ones((*x.q.shape[:2], 2), dtype), jnp.ones((len(x.v), 2), dtype)

    units, of_values_ = branched(ordinary, ones, lambda: (row_units(x.q, x.k, x.scale), of_values()))
    return x._replace(units=units, value_units=of_values_)


def are_ordinary(scale: Any, *arrays: Array) -> Array:
    """Return whether all units are 1, by a bound from one fast pass over each array."""
    result = jnp.abs(scale) <= 8
    for x in map(wide, arrays):
        # entries are below 2^60 in float32; no product of two rows, nor a sum over keys, reaches 2^124
        result = result & (jnp.vdot(x, x) < 2.0 ** (jnp.finfo(x.dtype).maxexp - 8))
    return result


def row_units(q: Array, k: Array, scale: Any) -> Array:
    """Return 2^u of each row as two factors, ``(h, n_q, 2)``: no score of ``q / 2^u`` overflows.

    ``q (h, n_q, d_k)`` is multiplied by ``scale`` before the product with ``k (u, n_k, d_k)``.
    """
    of_k = jnp.repeat(log2_magnitude(k, (1, 2)), q.shape[0] // k.shape[0])  # (h,)
    bound = log2_magnitude(q, (2,)) + (of_k + math.log2(max(q.shape[2], 1)))[:, None]  # (h, n_q)
    bound = bound + jnp.log2(jnp.maximum(jnp.abs(scale), 1)).astype(bound.dtype)
    half, rest = _halves(bound, 3)
    return jnp.stack([half, rest], axis=-1)


def value_units(v: Array, more: Any, margin: int) -> Array:
    """Return 2^u of each head of ``v (u, n_k, d_v)`` as two factors, ``(u, 2)``: v · 2^(more − u) does not overflow."""
    return jnp.stack(_halves(log2_magnitude(v, (1, 2)) + more, margin), axis=-1)


def is_moderate(q: Array, k: Array, scale: Any, largest: Array) -> Array:
    """Return whether the backward may compute the weights from the forward's row statistics.

    Two computations of a large score differ by rounding errors, and exp makes a difference of scores a factor of the
    weights.
    """
    q_square, k_square = (jnp.max(jnp.sum(_finite(x) ** 2, axis=-1)) for x in (q, k))
    scores = jnp.sqrt(q_square) * jnp.sqrt(k_square) * jnp.abs(scale)  # the Cauchy–Schwarz bound
    return (scores <= LARGE) & (jnp.max(jnp.abs(_finite(largest))) <= LARGE)


def log2_magnitude(x: Array, axes: tuple[int, ...]) -> Array:
    """Return log2 of the largest finite absolute value, 0 if there is none: excluded entries may be NaN or infinite.

    A unit of such an entry would make the finite scores underflow.
    """
    x = wide(x)

    def larger(a: Array, b: Array) -> Array:
        return jnp.maximum(*(jnp.where(jnp.isfinite(y), jnp.abs(y), 0) for y in (a, b)))

    largest = lax.reduce(x, jnp.zeros((), x.dtype), larger, axes)  # XLA would store the arguments of jnp.max
    return jnp.log2(jnp.where(largest > 0, largest, 1))


def _finite(x: Array) -> Array:
    x = wide(x)
    return jnp.where(jnp.isfinite(x), x, 0)


def _halves(bound: Array, margin: int) -> tuple[Array, Array]:
    """Return 2^u as two factors, for the least u ≥ 0 for which 2^(bound − u + margin) is finite."""
    most = jnp.finfo(bound.dtype).maxexp - margin
    u = jnp.clip(jnp.ceil(bound - most), 0, 2 * most - 2).astype(jnp.int32)
    one = jnp.ones((), bound.dtype)
    return jnp.ldexp(one, u // 2), jnp.ldexp(one, u - u // 2)
