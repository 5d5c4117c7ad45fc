"""The keys and values of the positions so far, for decoding: written where they stand, never copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from ..backend import Array
from ..functional._arguments import checked_call
from ..functional._attention import _operation as attention
from ._base import BaseCache, size_of
from ._lengths import grown, known

__all__ = ["KVCache"]


@dataclass(frozen=True, eq=False, repr=False)
class KVCache(BaseCache):
    """Keys and values of up to ``capacity`` positions, for each entry of a batch as many as it has. Use :meth:`create`.

    A cache is bound to a place like a layer: made by ``backend=`` or under a selection it takes arrays of any
    library and :meth:`attention` returns that library's; made by default it takes NumPy's.

    :meth:`append` and :meth:`rewind` return the next cache. Where the library writes in place (NumPy, torch,
    CuPy) both share one memory, so the cache that they were called on is **consumed**: its use raises
    ArgumentError. :meth:`copy` it before, to continue it in two ways. JAX's caches stay what they were; donate
    them to a compiled step (``jax.jit(step, donate_argnums=…)``) and it writes in place too. There a cache is a
    pytree with its lengths among the arrays, so one compilation serves every position.

    See Also
    --------
    PagedKVCache : entries of very different lengths share one memory.
    SlidingKVCache : the last positions only, in a memory that does not grow with the text.

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
            Its memory is (batch, kv_heads, capacity, head_dim) for the keys.
        value_dim : int, optional
            The features of a value; the default is ``head_dim``.
        dtype : str
            Of what it takes.
        backend, device : str, optional
            Where it is; the default is the selection in force, else NumPy.

        Raises
        ------
        ArgumentError, DTypeError, UnknownBackendError, BackendUnavailableError
        """
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"batch": batch, "kv_heads": kv_heads, "capacity": capacity, "head_dim": head_dim}
        *lead, d_k, d_v = (size_of(name, x) for name, x in {**sizes, "value_dim": value_dim}.items())
        return cls._made(lead[0], tuple(lead), (d_k, d_v), dtype, backend, device)

    @property
    def k(self) -> Array:
        """The keys, (B, H_kv, n, d_k): a view up to the longest entry, to the capacity where lengths are traced."""
        return self._fresh().keys[:, :, : self._longest(), :]

    @property
    def v(self) -> Array:
        """The values, (B, H_kv, n, d_v), as :attr:`k`."""
        return self._fresh().values[:, :, : self._longest(), :]

    def _longest(self) -> int | None:
        held = known(self.counts, self.place)
        return None if held is None else int(held.max())

    def _grown(self, n: int) -> dict[str, Any]:
        return {"counts": grown(self.counts, n, self.capacity, self.place)}

    def _written(self, k: Array, v: Array, following: dict[str, Any]) -> tuple[Array, Array]:
        start, put = self._start(), self.place.backend.update_slice
        return put(self.keys, k, start, 2), put(self.values, v, start, 2)

    def _attended(self, q: Array, arguments: dict[str, Any]) -> Array:
        start, longest, n_q = self._start(), self._longest(), q.shape[-2]
        # A library that compiles would do so for each new length: there the whole memory is read.
        end = longest if self.in_place and longest is not None else self.capacity
        k, v = self.keys[:, :, :end, :], self.values[:, :, :end, :]
        where: dict[str, Any] = {"q_offset": self.lengths - n_q, "key_lengths": self.lengths}
        if isinstance(start, int):
            where = {"q_offset": start - n_q, "key_lengths": None if start == end else start}
        arrays, settings = checked_call(q, k, v, **self._cut(arguments, end), **where)
        own = {name: arrays[name] for name in ("k", "v", *where)}
        return attention.evaluate(self._embarked_but(arrays, own), {"settings": settings})
