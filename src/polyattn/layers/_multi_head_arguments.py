"""The arguments of multi-head attention: checked, and divided into arrays and static arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend import Array, Place
from ..errors import ArgumentError, BackendMismatchError, ShapeError
from ..functional._arguments import expect_keywords
from ..functional._checks import ShapeDtype, shown
from ..functional._rotary_embedding import DEFAULT_BASE, Rotation, checked_rotation, expect_positions
from ..kernels._arrays import broadcast_shapes
from ..kv_cache import KVCache, PagedKVCache, SlidingKVCache

NORMS = ("layer", "rms")
ROTARY: dict[str, Any] = {"base": DEFAULT_BASE, "dim": None, "interleaved": False, "scaling": None}
"""The settings of a rotary embedding, and what they are where they are not given."""


def checked_norm(name: str, norm: Any) -> str:
    """Return the name of a norm."""
    if norm not in NORMS:
        raise ArgumentError(f"{name}: expected one of {', '.join(NORMS)}, got {shown(norm)}")
    return str(norm)


def checked_rotary(rotary: Any, head_dim: int) -> tuple[dict[str, Any] | None, Rotation | None]:
    """Return all settings of a rotary embedding, and its rotation; None twice where there is none."""
    if rotary is None or rotary is False:
        return None, None
    given = {} if rotary is True else rotary
    if not isinstance(given, Mapping) or not set(given) <= set(ROTARY):
        raise ArgumentError(f"rotary: expected True, or a dict with some of {', '.join(ROTARY)}, got {shown(rotary)}")
    settings = {**ROTARY, **given}
    if settings["dim"] is None and head_dim % 2:
        raise ShapeError(f"head_dim: expected an even number to rotate, got {head_dim}; rotary's dim rotates fewer")
    return settings, checked_rotation(ShapeDtype((head_dim,), None), **settings)


def sources(query: Array, key: Array | None, value: Array | None, value_is_query: bool = False) -> tuple[Array, Array]:
    """Return what keys and values are projected from: a key that is None is the query, a value the query or the key."""
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


def checked_positions(positions: Any, query: Array, key: Array | None, rotation: Rotation | None) -> dict[str, Array]:
    """Return the positions of the queries and of the keys by name, where they are given."""
    if positions is None:
        return {}
    if rotation is None:
        raise ArgumentError("positions: expected none, since the layer has no rotary embedding")
    if not isinstance(positions, tuple | list):
        if key is not None:
            raise ArgumentError("positions: expected a pair (those of the query, those of the key), got one for both")
        positions = (positions, positions)
    if len(positions) != 2:
        raise ArgumentError(f"positions: expected integers or a pair of them, got {len(positions)}")
    for of, x in zip(positions, (query, query if key is None else key), strict=True):
        expect_positions("positions", of, tuple(x.shape[:-2]), x.shape[-2])
    return {"positions": positions[0], "key_positions": positions[1]}


def checked_decoding(
    layer: str, cache: Any, place: Place, arguments: dict[str, Any], window: Any, sinks: bool
) -> dict[str, Any]:
    """Return the arguments of the cache's attention, once the cache and they are what a layer can decode with."""
    if not isinstance(cache, KVCache | PagedKVCache | SlidingKVCache):
        raise ArgumentError(f"cache: expected a KVCache or one of its kinds, got {type(cache).__name__}")
    if cache.place.backend is not place.backend or cache.place.device != place.device:
        raise BackendMismatchError(f"cache: expected one on {place}, to which the layer is bound, got {cache!r}")
    expect_keywords(f"{layer}.decode", arguments, "scale", *cache.OWN, *(("sinks",) if sinks else ()))
    if window is None or "window" in arguments:
        return arguments
    if not isinstance(cache, SlidingKVCache):
        return {"window": window, **arguments}
    if window[0] != cache.window - 1:
        raise ArgumentError(f"cache: expected one that slides over the layer's window {window}, got {cache.window}")
    return arguments
