"""JAX, told how a cache crosses the boundary of ``jax.jit``. Imported only once JAX is asked for."""

from __future__ import annotations

import functools
import threading
from typing import Any

import jax

from polyattn.backend import Cache

__all__ = ["jax", "register"]

_lock = threading.Lock()


def register(kind: type) -> None:
    """Make a pytree of a dataclass, once, however many threads ask."""
    with _lock:
        _registered(kind)


@functools.cache
def _registered(kind: Any) -> None:
    jax.tree_util.register_dataclass(kind, data_fields=kind.DATA_FIELDS, meta_fields=kind.STATIC_FIELDS)


register(Cache)
