"""The key-value cache of a sliding window, with memory and time independent of the length of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ..backend import Array
from ..errors import ArgumentError
from ..functional import _attention
from ..functional._arguments import checked_call
from ..functional._checks import shown
from ..kernels import StructuredBias, StructuredMask, cast
from ._base import BaseCache, InOrderCache, alike, size_of, sizes_of
from ._lengths import known, native, rewound
from ._ring import Ring

__all__ = ["SlidingKVCache"]


@dataclass(frozen=True, eq=False, repr=False)
class SlidingKVCache(InOrderCache):
    """Keys and values of the last ``window`` positions, and of the first ``sink_tokens`` if any. Use :meth:`create`.

    A query may attend to the ``window`` positions that end with its own, as with ``window=(window - 1, 0)`` of
    :func:`polyattn.attention`, and to the sink tokens. The memory is a ring buffer: a new position overwrites one that
    no later query can see. Positions are counted from the start of the sequence: rotate queries and keys with
    ``offset=cache.position``. The methods are those of :class:`KVCache`; the capacity is never exceeded.

    ``chunk`` is the largest number of queries in a call of :meth:`attention`, and of positions that :meth:`rewind` can
    remove: the ring buffer holds ``window + chunk − 1`` positions. Any number of positions can be appended at once.
    For a long prompt, call ``polyattn.attention(…, causal=True, window=(window - 1, 0))`` and append its keys and
    values, of which the cache keeps the last.

    The key axis of a mask, a bias or segment ids has the length ``capacity`` and the order of the memory, which
    :attr:`key_positions` shows; :attr:`k` and :attr:`v` have the same order. Structured masks and biases, and dropout,
    are not supported, since they depend on the index of a key.

    Notes
    -----
    Xiao et al., "Efficient streaming language models with attention sinks" (2023). Unlike there, sink tokens keep
    their positions, and are not moved to the start of the window.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> cache = pa.SlidingKVCache.create(batch=1, kv_heads=1, window=2, head_dim=1, sink_tokens=1, dtype="float64")
    >>> for number in range(6):
    ...     cache = cache.append(np.zeros((1, 1, 1, 1)), np.full((1, 1, 1, 1), float(number)))
    >>> cache.position, cache.capacity, cache.key_positions
    (6, 3, array([[0, 5, 4]], dtype=int32))
    >>> cache.attention(np.zeros((1, 1, 1, 1)))  # the mean of 0, 5 and 4
    array([[[[3.]]]])
    """

    lows: Array
    """The first position after the sink tokens still in memory, for each entry; of the same kind as ``counts``."""
    window: int
    sink_tokens: int
    chunk: int

    ARRAYS: ClassVar[tuple[str, ...]] = (*BaseCache.ARRAYS, "lows")
    OWN: ClassVar[tuple[str, ...]] = (*BaseCache.OWN, "window", "dropout", "seed")

    @classmethod
    def create(
        cls, batch: int, kv_heads: int, window: int, head_dim: int, value_dim: int | None = None,
        sink_tokens: int = 0, chunk: int = 1, dtype: str = "float32", backend: str | None = None,
        device: str | None = None,
    ) -> Self:  # fmt: skip
        """Return an empty cache.

        Parameters
        ----------
        batch, kv_heads, window, head_dim : int
            The memory of the keys is (batch, kv_heads, sink_tokens + window + chunk − 1, head_dim).
        value_dim : int, optional
            The number of features of a value; the default is ``head_dim``.
        sink_tokens : int
            The number of first positions that are kept in addition to the window.
        chunk : int
            The largest number of queries in a call of :meth:`attention`.
        dtype : str
            The dtype of keys, values and queries.
        backend, device : str, optional
            The place of the cache; the default is the selection in force, else NumPy.

        Raises
        ------
        ArgumentError, DTypeError, UnknownBackendError, BackendUnavailableError
        """
        sizes = {"batch": batch, "kv_heads": kv_heads, "window": window, "chunk": chunk}
        (batch, kv_heads, window, chunk), features = sizes_of(head_dim, value_dim, **sizes)
        sink_tokens = size_of("sink_tokens", sink_tokens, least=0)
        shape = (batch, kv_heads, Ring(sink_tokens, window + chunk - 1).slots)
        return cls._empty(
            batch, shape, features, dtype, backend, device, lows=np.zeros(batch, np.int32),
            window=window, sink_tokens=sink_tokens, chunk=chunk,
        )  # fmt: skip

    @property
    def key_positions(self) -> Array:
        """The position in each slot of the memory: int32 (B, capacity), −1 for an empty slot."""
        self._unconsumed()
        xp = self.place.backend.namespace()
        return self._positions(xp, native(self.counts, self.place), native(self.lows, self.place), self.capacity)

    @property
    def _ring(self) -> Ring:
        return Ring(self.sink_tokens, self.window + self.chunk - 1)

    def _positions(self, xp: Any, counts: Array, lows: Array, slots: int) -> Array:
        device = None if xp is np else self.place.backend.native_device(self.place.device)
        places = xp.arange(slots, dtype=xp.int32, device=device)
        found = self._ring.positions(xp, places, counts)  # (B, slots)
        gone = xp.logical_and(places[None, :] >= self.sink_tokens, found < lows[:, None])
        return xp.where(gone, xp.full_like(found, -1), found)

    # ---- append and rewind --------------------------------------------------------------------------------------

    def _grown(self, n: int) -> dict[str, Any]:
        held, lows = known(self.counts, self.place), known(self.lows, self.place)
        if held is None or lows is None:
            xp, counts = self.place.backend.namespace(), native(self.counts, self.place) + n
            return {"counts": counts, "lows": xp.maximum(native(self.lows, self.place), counts - self._ring.length)}
        counts = np.asarray(held + n, dtype=np.int32)
        return {"counts": counts, "lows": np.maximum(lows, counts - np.int32(self._ring.length))}

    def _written(self, k: Array, v: Array, following: dict[str, Any]) -> tuple[Array, Array]:
        """Write each range of consecutive slots; if there are several and the library copies, all at once."""
        put, ring, n = self.place.backend.update_slice, self._ring, int(k.shape[2])
        held, keys, values = known(self.counts, self.place), self.keys, self.values
        if held is None and n == 1:
            at = ring.slot(self.place.backend.namespace(), self._start())
            return put(keys, k, at, 2), put(values, v, at, 2)
        runs = [] if held is None else ring.runs(held, n)
        if held is None or not (self.in_place or len(runs) == 1):
            return self._selected(keys, k, following["counts"]), self._selected(values, v, following["counts"])
        for first, stop in runs:
            at = alike(ring.slot(np, held + np.int32(first)))
            keys, values = (put(x, new[:, :, first:stop, :], at, 2) for x, new in ((keys, k), (values, v)))
        return keys, values

    def _overwritten(self, n: int) -> list[tuple[Any, Array, Array]]:
        """Copy the slots of the new positions, once the ring buffer is full."""
        held, ring = known(self.counts, self.place), self._ring
        if held is None or int(held.max()) + n <= ring.slots:
            return []
        xp = self.place.backend.namespace()

        def read(x: Array, at: Any, length: int) -> Array:
            if isinstance(at, int):
                return xp.asarray(x[:, :, at : at + length, :], copy=True)
            return xp.concat([x[i : i + 1, :, a : a + length, :] for i, a in enumerate(at.tolist())], axis=0)

        found = []
        for first, stop in ring.runs(held, n):
            at = alike(ring.slot(np, held + np.int32(first)))
            found.append((at, read(self.keys, at, stop - first), read(self.values, at, stop - first)))
        return found

    def _selected(self, x: Array, new: Array, counts: Array) -> Array:
        """Return the memory with new positions written, as a selection between old and new for each slot."""
        xp, (batch, heads, n, d) = self.place.backend.namespace(), new.shape
        device = self.place.backend.native_device(self.place.device)
        after = native(counts, self.place)
        held = self._ring.positions(xp, xp.arange(self.capacity, dtype=xp.int32, device=device), after)  # (B, slots)
        number = held - (after[:, None] - n)  # the index among the new positions
        rows = xp.clip(number, 0, n - 1) + xp.arange(batch, dtype=xp.int32, device=device)[:, None] * n
        flat = xp.reshape(xp.permute_dims(new, (0, 2, 1, 3)), (batch * n, heads, d))
        taken = xp.reshape(xp.take(flat, xp.reshape(rows, (-1,)), axis=0), (batch, self.capacity, heads, d))
        return xp.where((number >= 0)[:, None, :, None], xp.permute_dims(taken, (0, 2, 1, 3)), x)

    def _shortened(self, name: str, given: Any) -> dict[str, Any]:
        counts = rewound(self.counts, name, given, self.place)
        kept, lows = known(counts, self.place), known(self.lows, self.place)
        if kept is None or lows is None:
            return {"counts": counts}
        if not self._holds(kept, kept, lows).all():
            raise ArgumentError(
                f"{name}: expected to remove at most chunk={self.chunk} positions, since older ones are "
                f"overwritten; the lengths are {self.counts.tolist()}, got {shown(given)}"
            )
        return {"counts": counts, "lows": np.where(kept <= self.sink_tokens, np.minimum(lows, kept), lows)}

    def _holds(self, first: Any, kept: Any, lows: Any) -> Any:
        """Return for each entry whether memory has all of ``kept`` positions that a query at ``first`` may see."""
        return (kept <= self.sink_tokens) | (np.maximum(self.sink_tokens, first - self.window + 1) >= lows)

    # ---- attention ----------------------------------------------------------------------------------------------

    def _attended(self, q: Array, arguments: dict[str, Any]) -> Array:
        for name in ("mask", "bias"):
            if isinstance(arguments.get(name), StructuredMask | StructuredBias):
                raise ArgumentError(
                    f"{name}: expected an array with {self.capacity} keys, the capacity, got "
                    f"{type(arguments[name]).__name__}, which depends on the index of a key; this is a ring buffer"
                )
        n_q = int(q.shape[-2])
        self._expect_held(n_q)
        end = self._read()
        k, v = self.keys[:, :, :end, :], self.values[:, :, :end, :]
        arrays, options = checked_call(q, k, v, **self._cut(arguments, end), q_offset=0)
        placed = self._placed({name: x for name, x in arrays.items() if name not in ("k", "v")})
        arrays |= placed.arrays
        mask = self._masked(arrays.get("mask"), n_q, end, options["causal"])
        if mask is not None:
            arrays["mask"] = mask
        return self._computed(_attention.OPERATION, placed, arrays, {**options, "causal": False})  # causal in mask

    def _expect_held(self, n_q: int) -> None:
        held, lows = known(self.counts, self.place), known(self.lows, self.place)
        held_all = None if held is None or lows is None else self._holds(held - n_q, held, lows).all()
        if not (n_q <= self.chunk if held_all is None else held_all):
            raise ArgumentError(
                f"q: expected at most {self.chunk} queries, the cache's chunk, since older keys are overwritten, "
                f"got {n_q}"
            )

    def _masked(self, mask: Array | None, n_q: int, end: int, causal: bool) -> Array | None:
        """Return the mask combined with the window and causality, None if no pair is excluded."""
        held, lows = known(self.counts, self.place), known(self.lows, self.place)
        if held is not None and lows is not None and self._seen(np, held, lows, n_q, end, causal).all():
            return mask
        xp = self.place.backend.namespace()
        seen = self._seen(xp, native(self.counts, self.place), native(self.lows, self.place), n_q, end, causal)
        return seen if mask is None else xp.logical_and(mask, seen)

    def _seen(self, xp: Any, counts: Array, lows: Array, n_q: int, end: int, causal: bool) -> Array:
        """Return which slots of the memory each query may see, (B, 1, n_q, end)."""
        device = None if xp is np else self.place.backend.native_device(self.place.device)
        key = self._positions(xp, counts, lows, end)[:, None, :]  # (B, 1, end)
        row = xp.arange(n_q, dtype=xp.int32, device=device)
        query = ((cast(xp, counts, xp.int32) - n_q)[:, None] + row[None, :])[:, :, None]  # (B, n_q, 1)
        near = xp.logical_or(key > query - self.window, key < self.sink_tokens)
        seen = xp.logical_and(near, key >= 0)
        if causal:
            seen = xp.logical_and(seen, key <= query)
        return seen[:, None, :, :]
