"""The keys and values of the positions so far, for decoding: written where they stand, never copied."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from .. import registry
from ..backend import Array, Place, dtype_name
from ..errors import ArgumentError, ShapeError
from ..functional._arguments import checked_call, expect_keywords, static_integer
from ..functional._attention import _operation as attention
from ..functional._operation import (
    Trip,
    checked_dtype,
    embark_for,
    expect_arrays,
    expect_dtype,
    expect_rank,
    expect_shape,
    shown,
)
from ..selection import Bound, bound
from ._lengths import grown, known, native, rewound

__all__ = ["KVCache"]


@dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """Keys and values of up to ``capacity`` positions, for each entry of a batch as many as it has. Use :meth:`create`.

    A cache is bound to a place like a layer: made by ``backend=`` or under a selection it takes arrays of any
    library and :meth:`attention` returns that library's; made by default it takes NumPy's.

    :meth:`append` and :meth:`rewind` return the next cache. Where the library writes in place (NumPy, torch,
    CuPy) both share one memory, so the cache that they were called on is **consumed**: its use raises
    ArgumentError. :meth:`copy` it before, to continue it in two ways. JAX's caches stay what they were; donate
    them to a compiled step (``jax.jit(step, donate_argnums=…)``) and it writes in place too. There a cache is a
    pytree with its lengths among the arrays, so one compilation serves every position.

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

    keys: Array
    """The whole memory, (B, H_kv, capacity, d_k)."""
    values: Array
    """The whole memory, (B, H_kv, capacity, d_v)."""
    counts: Array
    """Each entry's length: NumPy's integers wherever they are known here, else the library's, traced ones say."""
    place: Place
    moves_inputs: bool
    in_place: bool

    DATA_FIELDS: ClassVar[tuple[str, ...]] = ("keys", "values", "counts")
    STATIC_FIELDS: ClassVar[tuple[str, ...]] = ("place", "moves_inputs", "in_place")

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
        *lead, d_k, d_v = (_size(name, x) for name, x in {**sizes, "value_dim": value_dim}.items())
        name = checked_dtype(dtype)
        place, moves_inputs = bound(backend, device)
        chosen = place.backend
        xp, native = chosen.namespace(), chosen.native_device(place.device)
        keys, values = (xp.zeros((*lead, d), dtype=chosen.dtype(name), device=native) for d in (d_k, d_v))
        chosen.register(cls)
        # Whether the library writes into an array that it is given, one learns by asking it to.
        probe = xp.zeros((1,), dtype=keys.dtype, device=native)
        in_place = chosen.update_slice(probe, xp.ones_like(probe), 0, 0) is probe
        return cls(keys, values, np.zeros(lead[0], np.int32), place, moves_inputs, in_place)

    # ---- what it holds ----------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """How many positions it has room for."""
        return int(self._fresh().keys.shape[2])

    @property
    def lengths(self) -> Array:
        """How many positions each entry holds: int32 (B,), of the cache's library."""
        return native(self.counts, self.place)

    @property
    def position(self) -> int | Array:
        """Where the next position stands: an integer where all entries are as long and it is known, else (B,).

        It is what ``offset=`` of :func:`~polyattn.functional.rotary_embedding` wants to know.
        """
        start = self._start()
        return start if isinstance(start, int) else self.lengths

    @property
    def k(self) -> Array:
        """The keys, (B, H_kv, n, d_k): a view up to the longest entry, to the capacity where lengths are traced."""
        return self._fresh().keys[:, :, : self._longest(), :]

    @property
    def v(self) -> Array:
        """The values, (B, H_kv, n, d_v), as :attr:`k`."""
        return self._fresh().values[:, :, : self._longest(), :]

    def __repr__(self) -> str:
        if self.keys is None:
            return "<KVCache, consumed>"
        held = known(self.counts, self.place)
        lengths = "traced" if held is None else held.tolist()
        shape = "×".join(str(n) for n in self.keys.shape)
        return f"<KVCache of {shape} {dtype_name(self.keys.dtype)} on {self.place}, lengths {lengths}>"

    # ---- what can be done with it -----------------------------------------------------------------------------

    def append(self, k: Array, v: Array) -> Self:
        """Return the cache with n more positions, written behind each entry's own end. This cache is consumed.

        To append prompts of different lengths, pad them at their ends and :meth:`rewind` by the padding.

        Parameters
        ----------
        k : array (B, H_kv, n, d_k)
        v : array (B, H_kv, n, d_v)

        Raises
        ------
        ArgumentError
            If there is no room left, before anything is written. Traced lengths cannot be looked at: then the last
            positions are overwritten, and ``lengths`` passes the capacity, which the next look at it finds.
        ShapeError, DTypeError, BackendMismatchError
            If the arrays do not fit.
        """
        n, start, put = self._fitting(k, v), self._start(), self.place.backend.update_slice
        counts = grown(self.counts, n, self.capacity, self.place)
        k, v = self._embarked({"k": k, "v": v}).arrays
        return self._next(put(self.keys, k, start, 2), put(self.values, v, start, 2), counts)

    def rewind(self, n: int | Array | None = None, *, lengths: int | Array | None = None) -> Self:
        """Return the cache without the last ``n`` positions, or with these ``lengths``. This cache is consumed.

        Parameters
        ----------
        n, lengths : int or integers (B,)
            One of the two: how many positions to take back, or how many to keep.

        Raises
        ------
        ArgumentError
            If an entry has not that many positions, where that can be looked at.
        """
        if (n is None) == (lengths is None):
            raise ArgumentError("n: expected either n or lengths")
        name, given = ("lengths", lengths) if n is None else ("n", n)
        self._fresh()
        return self._next(self.keys, self.values, rewound(self.counts, name, given, self.place))

    def copy(self) -> Self:
        """Return a cache with memory of its own."""
        self._fresh()
        xp = self.place.backend.namespace()
        return replace(self, keys=xp.asarray(self.keys, copy=True), values=xp.asarray(self.values, copy=True))

    def attention(self, q: Array, **arguments: Any) -> Array:
        """Return attention of the last n_q positions over all that the cache holds.

        Parameters
        ----------
        q : array (B, H, n_q, d_k)
            The queries of the positions that were appended last.
        **arguments
            As of :func:`polyattn.attention`, ``causal`` being True unless it is given; ``q_offset`` and
            ``key_lengths`` are the cache's to know. A mask, a bias and the ids of the keys are as wide as the
            capacity, or one wide, on every library.

        Returns
        -------
        array (B, H, n_q, d_v)
            In the library and on the device of ``q``.
        """
        expect_keywords("KVCache.attention", arguments, "q_offset", "key_lengths")
        self._fresh()._expect_dtype(q=q)
        expect_rank("q", q, 2)
        start, longest, n_q = self._start(), self._longest(), q.shape[-2]
        # A library that compiles would do so for each new length: there the whole memory is read.
        end = longest if self.in_place and longest is not None else self.capacity
        k, v = self.keys[:, :, :end, :], self.values[:, :, :end, :]
        where: dict[str, Any] = {"q_offset": self.lengths - n_q, "key_lengths": self.lengths}
        if isinstance(start, int):
            where = {"q_offset": start - n_q, "key_lengths": None if start == end else start}
        arrays, settings = checked_call(q, k, v, **{"causal": True, **self._cut(arguments, end)}, **where)
        own = {name: arrays[name] for name in ("k", "v", *where)}
        trip = self._embarked({name: x for name, x in arrays.items() if name not in own})
        own |= dict(zip((name for name in arrays if name not in own), trip.arrays, strict=True))
        return attention.evaluate(replace(trip, arrays=tuple(own[name] for name in arrays)), {"settings": settings})

    # ---- how ---------------------------------------------------------------------------------------------------

    def _fresh(self) -> Self:
        if self.keys is None:
            raise ArgumentError(
                "cache: it was appended to or rewound, which consumes it; use the cache that was returned, "
                "or copy() it before"
            )
        return self

    def _next(self, keys: Array, values: Array, counts: Array) -> Self:
        following = replace(self, keys=keys, values=values, counts=counts)
        if self.in_place:
            object.__setattr__(self, "keys", None)
            object.__setattr__(self, "values", None)
        return following

    def _longest(self) -> int | None:
        held = known(self.counts, self.place)
        return None if held is None else int(held.max())

    def _start(self) -> int | Array:
        """Return where the next position stands, in each entry if they differ or are not known."""
        held = known(self.counts, self.place)
        if held is None:
            return self.counts[0] if self.counts.shape[0] == 1 else self.counts
        return int(held[0]) if (held == held[0]).all() else held

    def _fitting(self, k: Array, v: Array) -> int:
        """Check new keys and values, and return how many positions they are."""
        self._fresh()._expect_dtype(k=k, v=v)
        expect_rank("k", k, 3)
        n, (batch, heads, _, d_k) = int(k.shape[-2]), self.keys.shape
        expect_shape("k", k, (batch, heads, n, d_k))
        expect_shape("v", v, (batch, heads, n, self.values.shape[-1]))
        return n

    def _expect_dtype(self, **arrays: Array) -> None:
        expect_arrays(**arrays)
        expect_dtype(dtype_name(self.keys.dtype), "the cache's", **arrays)

    def _cut(self, arguments: dict[str, Any], end: int) -> dict[str, Any]:
        """Return arguments that are as wide as the capacity, as wide as what is read."""

        def cut(name: str, x: Any) -> Any:
            if not registry.looks_like_array(x) or x.ndim == 0 or (name != "segment_ids" and x.shape[-1] == 1):
                return x
            if x.shape[-1] != self.capacity:
                raise ShapeError(f"{name}: expected a width of {self.capacity}, the capacity, got {tuple(x.shape)}")
            return x[..., :end]

        result = arguments | {name: cut(name, arguments[name]) for name in ("mask", "bias") if name in arguments}
        ids = arguments.get("segment_ids")
        if isinstance(ids, tuple | list) and len(ids) == 2:
            result["segment_ids"] = (ids[0], cut("segment_ids", ids[1]))
        return result

    def _embarked(self, arrays: dict[str, Array | None]) -> Trip:
        remedy = "make it with KVCache.create(…, backend={!r})"
        return embark_for(Bound(self.place, self.moves_inputs), arrays, "cache", remedy)


def _size(name: str, x: Any) -> int:
    size = static_integer(name, x, ())
    if size is None or size < 1:
        raise ArgumentError(f"{name}: expected a positive integer, got {shown(x)}")
    return size
