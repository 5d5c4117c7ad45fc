"""Checks of the arguments of multi-head attention, and their division into arrays and static arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..backend import Array, Place
from ..errors import ArgumentError, BackendMismatchError, ShapeError
from ..functional._arguments import (
    Arguments,
    broadcast_lead,
    checked_options,
    expect_broadcastable,
    expect_keywords,
)
from ..functional._checks import ShapeDtype, expect_dtype, expect_rank, shown
from ..functional._rotary_embedding import DEFAULT_BASE, Rotation, checked_rotation, expect_positions, expect_start
from ..kernels import Sizes
from ..kv_cache import KVCache, PagedKVCache, SlidingKVCache

if TYPE_CHECKING:
    from ._multi_head_attention import MultiHeadAttention

NORMS = ("layer", "rms")
ROTARY: dict[str, Any] = {"base": DEFAULT_BASE, "dim": None, "interleaved": False, "scaling": None}
"""The settings of a rotary embedding, with their defaults."""


def checked_norm(name: str, norm: Any) -> str:
    """Check the name of a norm, and return it."""
    if norm not in NORMS:
        raise ArgumentError(f"{name}: expected one of {', '.join(NORMS)}, got {shown(norm)}")
    return str(norm)


def checked_rotary(rotary: Any, head_dim: int) -> tuple[dict[str, Any] | None, Rotation | None]:
    """Return all settings of a rotary embedding and its rotation, or ``(None, None)`` without one."""
    if rotary is None or rotary is False:
        return None, None
    given = {} if rotary is True else rotary
    if not isinstance(given, Mapping) or not set(given) <= set(ROTARY):
        raise ArgumentError(f"rotary: expected True, or a dict with some of {', '.join(ROTARY)}, got {shown(rotary)}")
    settings = {**ROTARY, **given}
    if settings["dim"] is None and head_dim % 2:
        raise ShapeError(f"head_dim: expected an even number to rotate, got {head_dim}; or give rotary a smaller dim")
    return settings, checked_rotation(ShapeDtype((head_dim,), None), **settings)


class Inputs(NamedTuple):
    """The inputs that a call projects to queries, keys and values, each array once."""

    query: Array
    key: Array | None = None
    """None if it is the query."""
    value: Array | None = None
    """None if it is the query (``value_is_query``) or the key."""
    value_is_query: bool = False

    @property
    def sources(self) -> tuple[Array, Array]:
        """The inputs from which keys and values are projected."""
        key = self.query if self.key is None else self.key
        return key, self.value if self.value is not None else self.query if self.value_is_query else key


def checked_inputs(
    layer: MultiHeadAttention, query: Array, key: Array | None = None, value: Array | None = None
) -> Inputs:
    """Check the inputs, and return each array once."""
    expect_dtype(layer.dtype, "the layer's", query=query, key=key, value=value)
    key = None if key is query else key
    of_key, of_value = Inputs(query, key, value).sources
    value_is_query = of_value is query
    inputs = Inputs(query, key, None if value_is_query or of_value is of_key else value, value_is_query)
    widths = {"query": layer.d_model, "key": layer.d_key, "value": layer.d_value}
    for (name, width), x in zip(widths.items(), (query, of_key, of_value), strict=True):
        if name == "query" or x is not query:
            expect_rank(name, x, 2)
        if x.shape[-1] != width:
            raise ShapeError(f"{name}: expected (…, n, {width}), got {tuple(x.shape)}")
    if of_value.shape[-2] != of_key.shape[-2]:
        raise ShapeError(f"value: expected key's n_k={of_key.shape[-2]} rows, got {tuple(of_value.shape)}")
    return inputs


def checked_arguments(
    layer: MultiHeadAttention, arguments: dict[str, Any], query: Array, key: Array | None = None,
    value: Array | None = None,
) -> Arguments:  # fmt: skip
    """Check the arguments of a call, and return its arrays and static arguments by name."""
    positions = arguments.pop("positions", None)
    expect_keywords(type(layer).__name__, arguments, "scale", *(("sinks",) if layer.sinks else ()))
    inputs = checked_inputs(layer, query, key, value)
    of_key, of_value = inputs.sources
    rotated = {} if positions is None else checked_positions(positions, query, inputs.key, layer.rotation)
    named = {"query": query, "key": of_key, "value": of_value}
    batch = broadcast_lead(named, query.shape[:-2], of_key.shape[:-2], of_value.shape[:-2])
    sizes = Sizes(
        batch, layer.num_heads, layer.num_kv_heads, query.shape[-2], of_key.shape[-2], layer.head_dim, layer.value_dim
    )
    if layer.window is not None:
        arguments = {"window": layer.window, **arguments}
    arrays, options = checked_options(sizes, scale=layer.score_scale(), **arguments)
    if layer.rotation is not None and positions is None:
        expect_start("q_offset", options.get("q_offset"), query.shape[-2])
        if "q_offset" in arrays:
            expect_broadcastable("q_offset", arrays["q_offset"], tuple(query.shape[:-2]), "query's leading axes")
    given = {"query": query, "key": inputs.key, "value": inputs.value, **arrays, **rotated}
    options["value_is_query"] = inputs.value_is_query
    return Arguments({name: x for name, x in given.items() if x is not None}, options)


def checked_positions(positions: Any, query: Array, key: Array | None, rotation: Rotation | None) -> dict[str, Array]:
    """Check given positions, and return those of the queries and of the keys by name."""
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


def checked_decoding(layer: MultiHeadAttention, cache: Any, place: Place, arguments: dict[str, Any]) -> dict[str, Any]:
    """Check the key-value cache and the arguments of a decoding call, and return those of the cache's attention."""
    if not isinstance(cache, KVCache | PagedKVCache | SlidingKVCache):
        raise ArgumentError(f"cache: expected a KVCache, PagedKVCache or SlidingKVCache, got {type(cache).__name__}")
    if cache.place.backend is not place.backend or cache.place.device != place.device:
        raise BackendMismatchError(f"cache: expected one on {place}, to which the layer is bound, got {cache!r}")
    own = ("scale", *cache.OWN, *(("sinks",) if layer.sinks else ()))
    expect_keywords(f"{type(layer).__name__}.decode", arguments, *own)
    if layer.window is not None and "window" not in arguments:
        if not isinstance(cache, SlidingKVCache):
            arguments = {"window": layer.window, **arguments}
        elif layer.window[0] != cache.window - 1:
            raise ArgumentError(f"cache: expected one with the layer's window {layer.window}, got {cache.window}")
    return {**arguments, "scale": layer.score_scale()}
