"""Between a projection and attention: split into heads, and normalise and turn those of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..backend import Array, Backend
from ..errors import ArgumentError, ShapeError
from ..functional import _rotary_embedding
from ..functional._operation import shown
from ..functional._rotary_embedding import DEFAULT_BASE, Rotation, check_positions, checked_rotation
from ..kernels._arrays import broadcast_shapes
from . import _norm

ROTARY: dict[str, Any] = {"base": DEFAULT_BASE, "dim": None, "interleaved": False, "scaling": None}
"""The settings of a rotary embedding, and what they are where they are not given."""
SAVED = _norm.SAVED + 2
"""How many arrays a forward saves."""


class Plan(NamedTuple):
    """The static arguments of a multi-head attention besides attention's own."""

    heads: int
    kv_heads: int
    value_is_query: bool
    norm: str | None
    eps: float
    rotation: Rotation | None
    sinks: bool


@dataclass(frozen=True)
class Outline:
    """Shape and dtype of an array that is not computed yet, so that arguments are checked at the call."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)


def forward(
    backend: Backend, x: Array, heads: int, weight: Array | None, positions: Array | None, offset: int | Array | None,
    plan: Plan,
) -> tuple[Array, tuple[Array | None, ...]]:  # fmt: skip
    """(…, n, H·d) → (…, H, n, d): split, then normalised and turned where the layer does so."""
    x = split_heads(backend.namespace(), x, heads)  # (…, H, n, d)
    x, norm_saved = _norm.forward(backend, x, weight, None, norm=plan.norm, eps=plan.eps)
    if plan.rotation is None:
        return x, (*norm_saved, None, None)
    start, offset = (offset, None) if isinstance(offset, int) else (0, offset)
    x, turn = _rotary_embedding.forward(backend, x, positions, offset, start=start, rotation=plan.rotation)
    return x, (*norm_saved, *turn)


def backward(backend: Backend, dx: Array, saved: tuple[Any, ...], plan: Plan) -> tuple[Array, Array | None]:
    """Reverse each line: (…, H, n, d) → (…, n, H·d); the gradients of x and of the norm's weight."""
    *norm_saved, cos, sin = saved
    if plan.rotation is not None:
        dx, *_ = _rotary_embedding.backward(backend, dx, (cos, sin), rotation=plan.rotation)
    dx, dweight, _ = _norm.backward(backend, dx, tuple(norm_saved), norm=plan.norm, eps=plan.eps)
    return join_heads(backend.namespace(), dx), dweight


def split_heads(xp: Any, x: Array, heads: int) -> Array:
    """(…, n, H·d) → (…, H, n, d)."""
    x = xp.reshape(x, (*x.shape[:-1], heads, x.shape[-1] // heads))
    lead = tuple(range(x.ndim - 3))
    return xp.permute_dims(x, (*lead, x.ndim - 2, x.ndim - 3, x.ndim - 1))


def join_heads(xp: Any, x: Array) -> Array:
    """(…, H, n, d) → (…, n, H·d)."""
    lead = tuple(range(x.ndim - 3))
    x = xp.permute_dims(x, (*lead, x.ndim - 2, x.ndim - 3, x.ndim - 1))
    return xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def sources(query: Array, key: Array | None, value: Array | None, value_is_query: bool) -> tuple[Array, Array]:
    """Return what keys and values are made of: a key that is None is the query, a value the query or the key."""
    key = query if key is None else key
    return key, value if value is not None else query if value_is_query else key


def expect_matching(query: Array, key: Array, value: Array) -> None:
    """Require what attention requires of q, k and v, under the names and in the shapes that the caller knows."""
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError(f"value: expected key's n_k={key.shape[-2]} rows, got {tuple(value.shape)}")
    try:
        broadcast_shapes(*(tuple(x.shape[:-2]) for x in (query, key, value)))
    except ValueError:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ShapeError(f"expected leading axes that broadcast, got {shapes}") from None


def checked_rotary(rotary: Any, head_dim: int) -> tuple[dict[str, Any] | None, Rotation | None]:
    """Return all settings of a rotary embedding, and by what it turns; None twice where there is none."""
    if rotary is None or rotary is False:
        return None, None
    given = {} if rotary is True else rotary
    if not isinstance(given, Mapping) or not set(given) <= set(ROTARY):
        raise ArgumentError(f"rotary: expected True, or a dict with some of {', '.join(ROTARY)}, got {shown(rotary)}")
    settings = {**ROTARY, **given}
    if settings["dim"] is None and head_dim % 2:
        raise ShapeError(f"head_dim: expected an even number to turn, got {head_dim}; rotary's dim turns fewer")
    return settings, checked_rotation(Outline((head_dim,), None), **settings)


def checked_positions(
    positions: Any, query: Array, key: Array | None, rotary: bool
) -> tuple[Array | None, Array | None]:
    """Return the positions of the queries and of the keys, where they are given."""
    if positions is None:
        return None, None
    if not rotary:
        raise ArgumentError("positions: expected none, since the layer has no rotary embedding")
    if not isinstance(positions, tuple | list):
        if key is not None:
            raise ArgumentError("positions: expected a pair (those of the query, those of the key), got one for both")
        positions = (positions, positions)
    if len(positions) != 2:
        raise ArgumentError(f"positions: expected integers or a pair of them, got {len(positions)}")
    for of, x in zip(positions, (query, query if key is None else key), strict=True):
        check_positions("positions", of, tuple(x.shape[:-2]), x.shape[-2])
    return positions[0], positions[1]
