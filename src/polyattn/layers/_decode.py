"""Decoding: a layer's attention over a key-value cache, to which it appends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ..backend import Array, Backend, Place
from ..errors import ArgumentError, BackendMismatchError
from ..functional import _linear
from ..functional._arguments import expect_keywords
from ..kv_cache import KVCache, PagedKVCache, SlidingKVCache
from . import _heads
from ._heads import Plan, join_heads, split_heads

KeyValues = TypeVar("KeyValues", KVCache, PagedKVCache, SlidingKVCache)


def attend(
    backend: Backend, x: Array, parameters: Mapping[str, Array], cache: KeyValues, plan: Plan, arguments: dict[str, Any]
) -> tuple[Array, KeyValues]:
    """Return the result for the next positions, and the cache with their keys and values: the layer's formula."""

    def project(x: Array, name: str) -> Array:
        weight, bias = parameters[f"{name}_proj.weight"], parameters.get(f"{name}_proj.bias")
        return _linear.forward(backend, x, weight, bias)[0]

    xp, position = backend.namespace(), cache.position
    q_norm, k_norm = parameters.get("q_norm.weight"), parameters.get("k_norm.weight")
    q, _ = _heads.forward(backend, project(x, "q"), plan.heads, q_norm, None, position, plan)  # (B, H, n, d_k)
    k, _ = _heads.forward(backend, project(x, "k"), plan.kv_heads, k_norm, None, position, plan)
    v = split_heads(xp, project(x, "v"), plan.kv_heads)  # (B, H_kv, n, d_v)
    following = cache.append(k, v)
    sinks = {"sinks": parameters["sinks"]} if plan.sinks else {}
    out = following.attention(q, **sinks, **arguments)  # (B, H, n, d_v)
    return project(join_heads(xp, out), "out"), following  # (B, n, d_model)


def checked_arguments(
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
