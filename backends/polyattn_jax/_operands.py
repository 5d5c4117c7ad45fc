"""An attention problem as operands of the scan kernel: key heads, each with its query heads.

Batch and head axes are merged into one axis. So each loop runs over one axis, the query heads of a key
head are rows of one product, and an axis mapped by ``jax.vmap`` adds heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from polyattn.backend import Array, Problem

__all__ = ["Operands", "by_head", "mapped_over_heads", "operands", "wide", "with_axes"]

LIMIT = 2**29
"""Positions are int32 within ±LIMIT; sums of three of them fit."""


class Operands(NamedTuple):
    """The arrays and numbers of a problem with u key heads and h query heads, a multiple of u; None if absent."""

    q: Array  # (h, n_q, d_k)
    k: Array  # (u, n_k, d_k)
    v: Array  # (u, n_k, d_v)
    scale: Any
    softcap: Any
    least: Array | None  # (u,): query i attends to keys from i + least
    most: Array | None  # (u,): up to i + most
    lengths: Array | None  # (u,)
    q_segments: Array | None  # (u, n_q)
    k_segments: Array | None  # (u, n_k)
    sinks: Array | None  # (h,)
    mask: Array | None  # (masks, n_q or 1, n_k or 1)
    mask_of: Array | None  # (h,): the index of the mask of each query head
    units: Any = None  # (h, n_q, 2): two powers of two for each row, by which its scores are divided
    value_units: Any = None  # (u, 2): two powers of two for each key head, by which its values are divided

    @property
    def shared(self) -> int:
        """The number of query heads for each key head."""
        return int(self.q.shape[0]) // int(self.k.shape[0])


def operands(q: Array, k: Array, v: Array, problem: Problem) -> Operands:
    """Return the operands of a problem."""
    batch, heads, kv_heads, n_q, n_k, *_ = problem.sizes
    left, right = problem.reach

    def per_item(x: Array | None, *axes: int) -> Array | None:
        """Repeat an array of the batch axes and ``axes`` for each key head."""
        if x is None:
            return None
        x = jnp.broadcast_to(x, (*batch, *axes)).reshape(*batch, 1, *axes)
        return jnp.broadcast_to(x, (*batch, kv_heads, *axes)).reshape(-1, *axes)

    return Operands(
        by_head(q, (*batch, heads)), by_head(k, (*batch, kv_heads)), by_head(v, (*batch, kv_heads)),
        problem.scale, problem.softcap,
        per_item(None if left is None else _position(problem.q_offset, -left)),
        per_item(None if right is None else _position(problem.q_offset, right)),
        per_item(None if problem.key_lengths is None else _position(problem.key_lengths)),
        per_item(problem.q_segments, n_q), per_item(problem.k_segments, n_k),
        None if problem.sinks is None else jnp.broadcast_to(wide(problem.sinks), (*batch, heads)).reshape(-1),
        *_masks(problem),
    )  # fmt: skip


def by_head(x: Array, lead: tuple[int, ...]) -> Array:
    """Broadcast the axes before the last two to ``lead``, and merge them: ``(…, n, d)`` to ``(heads, n, d)``."""
    n, d = x.shape[-2:]
    if math.prod(x.shape[:-2]) != math.prod(lead):
        x = jnp.broadcast_to(wide(x), (*lead, n, d))  # wide, because its gradient is a sum
    return x.reshape(-1, n, d)


def with_axes(dx: Array, x: Array, lead: tuple[int, ...]) -> Array:
    """Reverse :func:`by_head`: return the gradient of ``x`` in its shape and dtype."""
    dx = dx.reshape(*lead, *dx.shape[1:])
    shape = (1,) * (dx.ndim - x.ndim) + x.shape
    axes = tuple(i for i, (n, m) in enumerate(zip(shape, dx.shape, strict=True)) if n != m)
    return dx.sum(axes).reshape(x.shape).astype(x.dtype)


def wide(x: Array) -> Array:
    """Return ``x`` in float32 at least."""
    return x if x.dtype == np.float64 else x.astype(np.float32)


def mapped_over_heads(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of Operands and arrays by query head, for which ``jax.vmap`` merges the mapped axis into heads.

    By default ``jax.vmap`` would compute both branches of each condition and copy the carry of each loop.
    """
    mapped: Any = jax.custom_batching.custom_vmap(function)

    def over_more(size: int, is_mapped: list[Any], x: Operands, *more: Array) -> Any:
        def joined(y: Array, has_axis: bool) -> Array:
            if jnp.ndim(y) == has_axis:  # a number, which a condition on mapped values has repeated for each of them
                return y[0] if has_axis else y
            y = y if has_axis else jnp.broadcast_to(y, (size, *y.shape))
            return y.reshape(-1, *y.shape[2:])

        whole, *others = jax.tree.map(joined, (x, *more), tuple(is_mapped))
        if x.mask is not None and not is_mapped[0].mask:
            whole = whole._replace(mask=x.mask)
        elif x.mask is not None:
            first = jnp.arange(size, dtype=np.int32) * x.mask.shape[1]
            whole = whole._replace(mask_of=whole.mask_of + jnp.repeat(first, len(whole.mask_of) // size))
        results = mapped(whole, *others)
        parts = jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), results)
        return parts, jax.tree.map(lambda _: True, parts)

    mapped.def_vmap(over_more)
    return mapped  # type: ignore[no-any-return]  # JAX is Any to the type checker


def _position(x: int | Array, shift: int = 0) -> Array:
    """Return ``x + shift`` as int32, with values out of range clipped."""
    if isinstance(x, int):
        return np.int32(min(max(x + shift, -LIMIT), LIMIT))
    ends = jnp.iinfo(x.dtype)
    near = jnp.clip(x, max(ends.min, -LIMIT), min(ends.max, LIMIT)).astype(np.int32)
    return near + np.int32(min(max(shift, -2 * LIMIT), 2 * LIMIT))  # twice LIMIT: the distance of two positions


def _masks(problem: Problem) -> tuple[Array | None, Array | None]:
    """Return the masks as ``(masks, n_q or 1, n_k or 1)``, and the index of the mask of each query head."""
    mask = problem.mask
    if mask is None:
        return None, None
    mask = mask.reshape((1,) * (2 - mask.ndim) + mask.shape)
    *lead, rows, keys = mask.shape
    numbers = np.arange(math.prod(lead), dtype=np.int32).reshape(lead)
    of_head = np.broadcast_to(numbers, problem.sizes.scores[:-2]).reshape(-1)
    return mask.reshape(-1, rows, keys), jnp.asarray(of_head)
