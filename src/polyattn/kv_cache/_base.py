"""The base classes of key-value caches: place, checks, append, rewind and attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from .. import registry
from ..backend import Array, Place, dtype_name
from ..errors import ArgumentError, ShapeError
from ..functional._arguments import expect_keywords, static_integer
from ..functional._checks import checked_dtype, expect_arrays, expect_dtype, expect_rank, expect_shape, shown
from ..functional._dispatch import Operation, Placed, compute, to_bound_device
from ..kernels import Record
from ..selection import Bound, bound
from ._lengths import known, native, rewound

__all__ = ["BaseCache", "InOrderCache", "alike", "size_of", "sizes_of"]


@dataclass(frozen=True, eq=False, repr=False)
class BaseCache(Record):
    """The keys and values of a batch, whose entries may have different lengths."""

    keys: Array
    """The memory of the keys, up to the capacity."""
    values: Array
    """The memory of the values, up to the capacity."""
    counts: Array
    """The length of each entry: NumPy integers if they are known, else (traced) integers of the library."""
    place: Place
    moves_inputs: bool
    in_place: bool

    ARRAYS: ClassVar[tuple[str, ...]] = ("keys", "values", "counts")
    OWN: ClassVar[tuple[str, ...]] = ("q_offset", "key_lengths")
    """The arguments of attention that the cache sets."""

    @classmethod
    def _empty(
        cls, batch: int, shape: tuple[int, ...], features: tuple[int, int], dtype: str, backend: str | None,
        device: str | None, **more: Any,
    ) -> Self:  # fmt: skip
        """Return an empty cache with memory of shape ``(*shape, d)``."""
        name = checked_dtype(dtype)
        place, moves_inputs = bound(backend, device)
        chosen = place.backend
        xp, native_device = chosen.namespace(), chosen.native_device(place.device)
        keys, values = (xp.zeros((*shape, d), dtype=chosen.dtype(name), device=native_device) for d in features)
        chosen.register(cls)
        # Test whether the library writes in place.
        probe = xp.zeros((1,), dtype=keys.dtype, device=native_device)
        in_place = chosen.update_slice(probe, xp.ones_like(probe), 0, 0) is probe
        return cls(keys, values, np.zeros(batch, np.int32), place, moves_inputs, in_place, **more)

    # ---- properties -------------------------------------------------------------------------------------------

    @property
    def lengths(self) -> Array:
        """The number of positions of each entry: int32 (B,), of the cache's library."""
        return native(self.counts, self.place)

    @property
    def position(self) -> int | Array:
        """The next position: an integer if all entries have the same known length, else integers (B,).

        Pass it as ``offset=`` to :func:`~polyattn.functional.rotary_embedding`.
        """
        start = self._start()
        return start if isinstance(start, int) else self.lengths

    @property
    def capacity(self) -> int:
        """The largest number of positions of an entry."""
        return int(self._unconsumed().keys.shape[2])

    def __repr__(self) -> str:
        name = type(self).__name__
        if self.keys is None:
            return f"<{name}, consumed>"
        held = known(self.counts, self.place)
        lengths = "traced" if held is None else held.tolist()
        shape = "×".join(str(n) for n in self.keys.shape)
        return f"<{name} of {shape} {dtype_name(self.keys.dtype)} on {self.place}, lengths {lengths}>"

    # ---- append, rewind, copy, attention ----------------------------------------------------------------------

    def append(self, k: Array, v: Array) -> Self:
        """Return the cache with n more positions, written at the end of each entry. This cache is consumed.

        To append prompts of different lengths, pad them at the end and :meth:`rewind` by the padding.

        Parameters
        ----------
        k : array (B, H_kv, n, d_k)
        v : array (B, H_kv, n, d_v)

        Raises
        ------
        ArgumentError
            If the capacity is exceeded; nothing is written then. Traced lengths cannot be checked: the excess
            positions are lost, and ``lengths`` exceeds the capacity, which the next call with readable lengths finds.
        ShapeError, DTypeError, BackendMismatchError
            If the arrays do not fit.
        """
        n = self._fitting(k, v)
        following = self._grown(n)
        placed = self._placed({"k": k, "v": v})
        k, v = placed.arrays["k"], placed.arrays["v"]
        if not n:
            return self._next(self.keys, self.values, following)
        before = self._overwritten(n) if self.in_place else []
        try:
            keys, values = self._written(k, v, following)
            return self._next(keys, values, following)
        except BaseException:  # an interrupt, or no memory: this cache is as it was
            for at, old_keys, old_values in before:
                self.place.backend.update_slice(self.keys, old_keys, at, 2)
                self.place.backend.update_slice(self.values, old_values, at, 2)
            raise

    def rewind(self, n: int | Array | None = None, *, lengths: int | Array | None = None) -> Self:
        """Return the cache without the last ``n`` positions, or with these ``lengths``. This cache is consumed.

        Parameters
        ----------
        n, lengths : int or integers (B,)
            One of the two: the number of positions to remove, or the number to keep.

        Raises
        ------
        ArgumentError
            If an entry has fewer positions; traced lengths are not checked.
        """
        if (n is None) == (lengths is None):
            raise ArgumentError("n: expected either n or lengths")
        name, given = ("lengths", lengths) if n is None else ("n", n)
        self._unconsumed()
        return self._next(self.keys, self.values, self._shortened(name, given))

    def copy(self) -> Self:
        """Return a copy of the cache, with its own memory."""
        self._unconsumed()
        xp = self.place.backend.namespace()
        return replace(self, keys=xp.asarray(self.keys, copy=True), values=xp.asarray(self.values, copy=True))

    def attention(self, q: Array, **arguments: Any) -> Array:
        """Return the attention of the last n_q positions to the positions in the cache.

        Parameters
        ----------
        q : array (B, H, n_q, d_k)
            The queries of the last n_q positions.
        **arguments
            As in :func:`polyattn.attention`, with ``causal=True`` by default and without ``q_offset`` and
            ``key_lengths``, which the cache sets. The key axis of a mask, a bias or segment ids has the length
            ``capacity``; that of a mask or a bias may also be 1.

        Returns
        -------
        array (B, H, n_q, d_v)
            In the library and on the device of ``q``.
        """
        expect_keywords(f"{type(self).__name__}.attention", arguments, *self.OWN)
        self._unconsumed()._expect_dtype(q=q)
        expect_rank("q", q, 2)
        return self._attended(q, {"causal": True, **arguments})

    # ---- implemented by the subclasses --------------------------------------------------------------------------

    def _grown(self, n: int) -> dict[str, Any]:
        """Return the changed fields after n more positions, or raise if there is no room for them."""
        raise NotImplementedError

    def _written(self, k: Array, v: Array, following: dict[str, Any]) -> tuple[Array, Array]:
        """Return the memory with the native keys and values written to it."""
        raise NotImplementedError

    def _overwritten(self, n: int) -> list[tuple[Any, Array, Array]]:
        """Return copies of what n more positions overwrite and this cache still needs: where, keys and values."""
        return []

    def _shortened(self, name: str, given: Any) -> dict[str, Any]:
        """Check a rewind, and return the changed fields."""
        return {"counts": rewound(self.counts, name, given, self.place)}

    def _attended(self, q: Array, arguments: dict[str, Any]) -> Array:
        """Return the result of attention."""
        raise NotImplementedError

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _unconsumed(self) -> Self:
        """Return the cache, or raise if it was consumed."""
        if self.keys is None:
            raise ArgumentError(
                "cache: it was appended to or rewound, which consumes it; use the returned cache, or copy() it before"
            )
        return self

    def _next(self, keys: Array, values: Array, changes: dict[str, Any]) -> Self:
        following = replace(self, keys=keys, values=values, **changes)
        if self.in_place:
            fields = self.__dict__
            # Assignments to items and returns are not interrupted: a caller that loses ``following`` keeps this cache.
            fields["keys"] = fields["values"] = None
        return following

    def _start(self) -> int | Array:
        """Return the next position: one integer if it is known and the same for all entries, else one for each."""
        held = known(self.counts, self.place)
        return self.counts if held is None else alike(held)

    def _fitting(self, k: Array, v: Array) -> int:
        """Check new keys and values, and return their number of positions."""
        self._unconsumed()._expect_dtype(k=k, v=v)
        expect_rank("k", k, 3)
        n, batch, (_, heads, _, d_k) = int(k.shape[-2]), self.counts.shape[0], self.keys.shape
        expect_shape("k", k, (batch, heads, n, d_k))
        expect_shape("v", v, (batch, heads, n, self.values.shape[-1]))
        return n

    def _expect_dtype(self, **arrays: Array) -> None:
        expect_arrays(**arrays)
        expect_dtype(dtype_name(self.keys.dtype), "the cache's", **arrays)

    def _cut(self, arguments: dict[str, Any], end: int) -> dict[str, Any]:
        """Return the arguments with key axes cut from the capacity to the ``end`` positions that are read."""

        def cut(name: str, x: Any) -> Any:
            if not registry.looks_like_array(x) or x.ndim == 0 or (name != "segment_ids" and x.shape[-1] == 1):
                return x
            if x.shape[-1] != self.capacity:
                raise ShapeError(f"{name}: expected {self.capacity} keys, the capacity, got {tuple(x.shape)}")
            return x[..., :end]

        result = arguments | {name: cut(name, arguments[name]) for name in ("mask", "bias") if name in arguments}
        ids = arguments.get("segment_ids")
        if isinstance(ids, tuple | list) and len(ids) == 2:
            result["segment_ids"] = (ids[0], cut("segment_ids", ids[1]))
        return result

    def _placed(self, arrays: dict[str, Array]) -> Placed:
        """Move the caller's arrays to the cache's place."""
        remedy = f"create it with {type(self).__name__}.create(…, backend={{!r}})"
        return to_bound_device(arrays, Bound(self.place, self.moves_inputs), "cache", remedy)

    def _computed(self, operation: Operation, placed: Placed, arrays: dict[str, Array], options: Any) -> Array:
        """Return an operation's result for native arrays, moved to the input device of ``placed``."""
        y = compute(self.place.backend, operation.forward, operation.backward, arrays, options)
        return placed.to_input_device(y, operation.name)


@dataclass(frozen=True, eq=False, repr=False)
class InOrderCache(BaseCache):
    """A cache with memory (B, H_kv, capacity, d), written from the start on."""

    @property
    def k(self) -> Array:
        """The keys in the order of the memory, (B, H_kv, n, d_k): a view, with n the length of the longest entry.

        If the lengths are traced, n is the capacity.
        """
        return self._unconsumed().keys[:, :, : self._end(), :]

    @property
    def v(self) -> Array:
        """The values, (B, H_kv, n, d_v), as :attr:`k`."""
        return self._unconsumed().values[:, :, : self._end(), :]

    def _end(self) -> int | None:
        """Return the number of positions of the memory that are written, None if that is not known."""
        held = known(self.counts, self.place)
        return None if held is None else min(int(held.max()), self.capacity)

    def _read(self) -> int:
        """Return the number of positions that attention reads: all if each new length would need a compilation."""
        end = self._end() if self.in_place else None
        return self.capacity if end is None else end


def alike(starts: Any) -> int | Any:
    """Return NumPy integers as a single one if all are equal, else as they are."""
    return int(starts[0]) if (starts == starts[0]).all() else starts


def sizes_of(head_dim: Any, value_dim: Any, **sizes: Any) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Check the sizes of a cache; return them in order, and the features of its keys and values."""
    lead = tuple(size_of(name, x) for name, x in sizes.items())
    d_k = size_of("head_dim", head_dim)
    return lead, (d_k, d_k if value_dim is None else size_of("value_dim", value_dim))


def size_of(name: str, x: Any, least: int = 1) -> int:
    """Check an argument that is a size, and return it as an int."""
    size = static_integer(name, x, ())
    if size is None or size < least:
        kind = "a positive integer" if least else "an integer that is not negative"
        raise ArgumentError(f"{name}: expected {kind}, got {shown(x)}")
    return size
