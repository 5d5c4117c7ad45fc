"""JAX, with polyattn's caches, records and layers registered as pytrees. This module imports JAX."""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

import jax

from polyattn.backend import Cache

__all__ = ["PROCESS", "jax", "register"]

PROCESS = os.getpid()
"""The process that imported JAX, in which XLA has its threads."""
_lock = threading.Lock()


def register(kind: type) -> None:
    """Register a class of records or layers as a pytree, once and thread-safely."""
    with _lock:
        _registered(kind)


@functools.cache
def _registered(kind: Any) -> None:
    def with_names(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
        arrays, structure = x.flattened()
        return [(jax.tree_util.DictKey(n), y) for n, y in zip(structure.names, arrays, strict=True)], structure

    jax.tree_util.register_pytree_with_keys(kind, with_names, kind.unflattened, kind.flattened)


register(Cache)
