"""JAX, told how a cache or a layer crosses the boundary of ``jax.jit``. Imported only once JAX is asked for."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax

from polyattn.backend import Cache

__all__ = ["jax", "register"]

_lock = threading.Lock()


def register(kind: type) -> None:
    """Make a pytree of a dataclass or a layer, once, however many threads ask."""
    with _lock:
        _registered(kind)


@functools.cache
def _registered(kind: Any) -> None:
    if not hasattr(kind, "flattened"):
        jax.tree_util.register_dataclass(kind, data_fields=kind.DATA_FIELDS, meta_fields=kind.STATIC_FIELDS)
        return

    def with_names(layer: Any) -> tuple[list[tuple[Any, Any]], Any]:
        parameters, frame = layer.flattened()
        return [(jax.tree_util.DictKey(n), x) for n, x in zip(frame.names, parameters, strict=True)], frame

    jax.tree_util.register_pytree_with_keys(kind, with_names, kind.unflattened, kind.flattened)


register(Cache)
