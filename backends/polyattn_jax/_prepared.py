"""JAX, told how a cache crosses the boundary of ``jax.jit``. Imported only once JAX is asked for."""

from __future__ import annotations

import jax

from polyattn.backend import Cache

__all__ = ["jax"]

jax.tree_util.register_dataclass(Cache, data_fields=Cache.DATA_FIELDS, meta_fields=Cache.STATIC_FIELDS)
