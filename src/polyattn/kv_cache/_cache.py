"""The key-value cache with a fixed capacity, updated in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from ..backend import Array
from ..functional import _attention
from ..functional._arguments import checked_call
from ._base import InOrderCache, sizes_of
from ._lengths import grown

__all__ = ["KVCache"]


@dataclass(frozen=True, eq=False, repr=False)
class KVCache(InOrderCache):
    """Keys and values of up to ``capacity`` positions for each entry of a batch. Create it with :meth:`create`.

    A cache is bound to a place like a layer: created with ``backend=`` or under a selection, it takes arrays of any
    library, and :meth:`attention` returns arrays of that library; created by default, it takes NumPy arrays only.

    :meth:`append` and :meth:`rewind` return the next cache. If the library writes in place (NumPy, torch, CuPy), both
    caches share one memory, so the old one is **consumed**: using it raises ArgumentError. To continue a cache in two
    ways, :meth:`copy` it before. On JAX the old cache does not change; to write in place there, donate it to a
    compiled step (``jax.jit(step, donate_argnums=…)``). A JAX cache is a pytree with the lengths among its arrays, so
    one compilation serves every position.

    See Also
    --------
    PagedKVCache : entries of very different lengths share one pool of pages.
    SlidingKVCache : only the last positions, in memory that does not grow with the sequence.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> cache = pa.KVCache.create(batch=1, kv_heads=1, capacity=8, head_dim=2, dtype="float64")
    >>> for token in np.eye(2):
    ...     x = token.reshape(1, 1, 1, 2)
    ...     cache = cache.append(pa.functional.rotary_embedding(x, offset=cache.position), x)
    ...     out = cache.attention(x)
    >>> cache.position, cache.lengths, cache.k.shape
    (2, array([2], dtype=int32), (1, 1, 2, 2))
    """

    @classmethod
    def create(
        cls, batch: int, kv_heads: int, capacity: int, head_dim: int, value_dim: int | None = None,
        dtype: str = "float32", backend: str | None = None, device: str | None = None,
    ) -> Self:  # fmt: skip
        """Return an empty cache.

        Parameters
        ----------
        batch, kv_heads, capacity, head_dim : int
            The memory of the keys is (batch, kv_heads, capacity, head_dim).
        value_dim : int, optional
            The number of features of a value; the default is ``head_dim``.
        dtype : str
            The dtype of keys, values and queries.
        backend, device : str, optional
            The place of the cache; the default is the selection in force, else NumPy.

        Raises
        ------
        ArgumentError, DTypeError, UnknownBackendError, BackendUnavailableError
        """
        shape, features = sizes_of(head_dim, value_dim, batch=batch, kv_heads=kv_heads, capacity=capacity)
        return cls._empty(shape[0], shape, features, dtype, backend, device)

    def _grown(self, n: int) -> dict[str, Any]:
        return {"counts": grown(self.counts, n, self.capacity, self.place)}

    def _written(self, k: Array, v: Array, following: dict[str, Any]) -> tuple[Array, Array]:
        start, put = self._start(), self.place.backend.update_slice
        return put(self.keys, k, start, 2), put(self.values, v, start, 2)

    def _attended(self, q: Array, arguments: dict[str, Any]) -> Array:
        start, end, n_q = self._start(), self._read(), q.shape[-2]
        k, v = self.keys[:, :, :end, :], self.values[:, :, :end, :]
        where: dict[str, Any] = {"q_offset": self.lengths - n_q, "key_lengths": self.lengths}
        if isinstance(start, int):
            where = {"q_offset": start - n_q, "key_lengths": None if start == end else start}
        arrays, options = checked_call(q, k, v, **self._cut(arguments, end), **where)
        placed = self._placed({name: x for name, x in arrays.items() if name not in ("k", "v", *where)})
        return self._computed(_attention.OPERATION, placed, arrays | placed.arrays, options)
