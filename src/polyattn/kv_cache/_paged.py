"""The paged key-value cache, for entries of very different lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from array_api_compat import numpy as host

from ..backend import Array
from ..errors import ArgumentError
from ..functional._arguments import checked_call
from ..functional._checks import ShapeDtype, expect_shape
from ..kernels import Sizes, StructuredMask
from ._base import BaseCache, sizes_of
from ._lengths import known, native, rewound
from ._paged_attention import OPERATION
from ._pages import Pages, needed, writer

__all__ = ["PagedKVCache"]

NUMBERS = 2**20
"""The limit of elements of queries and results of the pages that are read together: 4 MiB in float32."""


@dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache(BaseCache):
    """Keys and values in a pool of ``pages`` pages of ``page_size`` positions, shared by the entries of a batch.

    The methods are those of :class:`KVCache`; create it with :meth:`create`. :meth:`append` allocates the next free
    page to an entry whose last page is full, and :meth:`rewind` frees pages that are no longer used. An entry may be
    as long as the pool: ``capacity`` is ``pages · page_size``, which is also the length of the key axis of a mask, a
    bias or segment ids. Structured masks and dropout are not supported, since they depend on the index of a key.

    :meth:`attention` reads the pages in place, without a dense copy. On JAX one compiled step serves every position
    and every assignment of pages.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> cache = pa.PagedKVCache.create(batch=2, kv_heads=1, pages=4, page_size=2, head_dim=1, dtype="float64")
    >>> x = np.arange(10.0).reshape(2, 1, 5, 1)
    >>> cache = cache.append(x[:, :, :3], x[:, :, :3]).rewind(np.array([0, 2]))  # of 3 and of 1 positions
    >>> cache = cache.append(x[:, :, 3:4], x[:, :, 3:4])
    >>> cache.table, cache.free_pages  # the first has two pages, the second one
    (array([[ 0,  1],
           [ 2, -1]], dtype=int32), 1)
    >>> cache.attention(np.zeros((2, 1, 1, 1))).ravel()  # the means of 0 … 3, and of 5 and 8
    array([1.5, 6.5])
    """

    owners: Array
    """The entry that owns each page, −1 if it is free; of the same kind of integers as ``counts``."""
    numbers: Array
    """The index of each page among the pages of its entry."""

    ARRAYS: ClassVar[tuple[str, ...]] = (*BaseCache.ARRAYS, "owners", "numbers")
    OWN: ClassVar[tuple[str, ...]] = (*BaseCache.OWN, "dropout", "seed")

    @classmethod
    def create(
        cls, batch: int, kv_heads: int, pages: int, page_size: int, head_dim: int, value_dim: int | None = None,
        dtype: str = "float32", backend: str | None = None, device: str | None = None,
    ) -> Self:  # fmt: skip
        """Return an empty cache.

        Parameters
        ----------
        batch, kv_heads, pages, page_size, head_dim : int
            The memory of the keys is (pages, kv_heads, page_size, head_dim). Large pages, of 64 positions and more,
            are read faster; on average, half a page is unused at the end of each entry.
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
        sizes = {"batch": batch, "kv_heads": kv_heads, "pages": pages, "page_size": page_size}
        (batch, kv_heads, pages, page_size), features = sizes_of(head_dim, value_dim, **sizes)
        free, zero = np.full(pages, -1, np.int32), np.zeros(pages, np.int32)
        shape = (pages, kv_heads, page_size)
        return cls._empty(batch, shape, features, dtype, backend, device, owners=free, numbers=zero)

    # ---- properties -------------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """The number of positions in a page."""
        return int(self._unconsumed().keys.shape[2])

    @property
    def capacity(self) -> int:
        """The number of positions in the pool, for all entries together."""
        return int(self._unconsumed().keys.shape[0]) * self.page_size

    @property
    def free_pages(self) -> int:
        """The number of free pages."""
        return int((self._host_pages().pages.owners < 0).sum())

    @property
    def table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The page table: the pages of each entry in order, (B, m) on the host, −1 after its last page."""
        on_host = self._host_pages()
        owners, numbers = on_host.pages
        longest = needed(on_host.counts, self.page_size).max()
        table = np.full((len(on_host.counts), longest), -1, np.int32)
        used = np.flatnonzero(owners >= 0)
        table[owners[used], numbers[used]] = used
        return table

    @property
    def k(self) -> Array:
        """The keys, (B, H_kv, n, d_k), up to the longest entry: a copy, for inspection."""
        return self._dense(self._unconsumed().keys)

    @property
    def v(self) -> Array:
        """The values, (B, H_kv, n, d_v), as :attr:`k`."""
        return self._dense(self._unconsumed().values)

    def _dense(self, x: Array) -> Array:
        xp, table = self.place.backend.namespace(), np.clip(self.table, 0, None)
        (batch, m), (_, heads, size, d) = table.shape, x.shape
        pages = xp.take(x, native(table.reshape(-1), self.place), axis=0)  # (B · m, H_kv, size, d)
        dense = xp.permute_dims(xp.reshape(pages, (batch, m, heads, size, d)), (0, 2, 1, 3, 4))
        return xp.reshape(dense, (batch, heads, m * size, d))[:, :, : int(self._host_pages().counts.max()), :]

    def _host_pages(self) -> _HostPages:
        """Return lengths and pages on the host, or raise if they are traced."""
        found = self._if_known()
        if found is None:
            raise ArgumentError("cache: its lengths and pages are traced, so that their values are not known")
        return found

    def _if_known(self) -> _HostPages | None:
        """Return lengths and pages on the host, None if they are traced or on a device."""
        self._unconsumed()
        counts, owners, numbers = (known(x, self.place) for x in (self.counts, self.owners, self.numbers))
        if counts is None or owners is None or numbers is None:
            return None
        return _HostPages(counts, Pages(owners, numbers))

    # ---- append and rewind --------------------------------------------------------------------------------------

    def _grown(self, n: int) -> dict[str, Any]:
        size, on_host = self.page_size, self._if_known()
        if on_host is None:
            xp, place = self.place.backend.namespace(), self.place
            counts, *pages = (native(x, place) for x in (self.counts, self.owners, self.numbers))
            return {"counts": counts + n, **Pages(*pages).allotted(xp, counts, n, size)._asdict()}
        wanted = int(needed(on_host.counts + n, size).sum())
        total = len(on_host.pages.owners)
        if wanted > total:
            raise ArgumentError(
                f"k: expected positions for which there are free pages: {n} more for each entry make {wanted} "
                f"pages of {size}, and the pool has {total}; the entries hold {on_host.counts.tolist()}"
            )
        allotted = on_host.pages.allotted(host, on_host.counts, n, size)
        return {"counts": np.asarray(on_host.counts + n, dtype=np.int32), **allotted._asdict()}

    def _shortened(self, name: str, given: Any) -> dict[str, Any]:
        counts = rewound(self.counts, name, given, self.place)
        kept, on_host = known(counts, self.place), self._if_known()
        if kept is not None and on_host is not None:
            return {"counts": counts, **on_host.pages.freed(host, kept, self.page_size)._asdict()}
        xp, (lengths, *pages) = (
            self.place.backend.namespace(),
            (native(x, self.place) for x in (counts, self.owners, self.numbers)),
        )
        return {"counts": lengths, **Pages(*pages).freed(xp, lengths, self.page_size)._asdict()}

    def _written(self, k: Array, v: Array, following: dict[str, Any]) -> tuple[Array, Array]:
        """Write the part of each new entry that falls into each page."""
        on_host, size, n = self._if_known(), self.page_size, int(k.shape[2])
        pages, reached = Pages(following["owners"], following["numbers"]), (n + 2 * size - 2) // size
        if on_host is None:
            xp, counts = self.place.backend.namespace(), native(self.counts, self.place)
        else:
            xp, counts = host, on_host.counts
        entries = xp.arange(counts.shape[0], dtype=xp.int32)
        numbers = (counts // size)[:, None] + xp.arange(reached, dtype=xp.int32)[None, :]  # (B, reached)
        found, there = pages.located(xp, entries, numbers)
        if on_host is not None and self.in_place:
            return self._written_in_place(k, v, on_host.counts.tolist(), found.tolist())
        begins = numbers * size - counts[:, None]  # the index among the new positions of a page's first
        begins = xp.where(there, begins, xp.full_like(begins, n))  # no page: nothing is written
        owners = xp.broadcast_to(entries[:, None], numbers.shape)
        steps = (native(xp.reshape(x, (-1,)), self.place) for x in (found, begins, owners))
        return writer(self.place.backend, self.place.device)(self.keys, self.values, k, v, *steps)

    def _written_in_place(self, k: Array, v: Array, starts: list[int], found: list[list[int]]) -> tuple[Array, Array]:
        size, n, put = self.page_size, int(k.shape[2]), self.place.backend.update_slice
        memory = [self.keys, self.values]
        for entry, (start, row) in enumerate(zip(starts, found, strict=True)):
            first = 0
            for page in row:
                at = (start + first) % size
                stop = min(first + size - at, n)
                if first >= stop:
                    break
                for i, new in enumerate((k, v)):
                    part, view = new[entry : entry + 1, :, first:stop, :], memory[i][page : page + 1, ...]
                    written = put(view, part, at, 2)
                    if written is not view:  # with autograd nothing is written in place
                        memory[i] = put(memory[i], written, page, 0)
                first = stop
        return memory[0], memory[1]

    # ---- attention ----------------------------------------------------------------------------------------------

    def _attended(self, q: Array, arguments: dict[str, Any]) -> Array:
        batch, total, size = self.counts.shape[0], self.keys.shape[0], self.page_size
        expect_shape("q", q, (batch, *q.shape[-3:]))
        if isinstance(arguments.get("mask"), StructuredMask):
            raise ArgumentError(
                f"mask: expected an array with {self.capacity} keys, the capacity, got "
                f"{type(arguments['mask']).__name__}, which depends on the index of a key; here keys are in pages"
            )
        # The arguments are checked against the keys and values that a dense cache would have.
        dense = [ShapeDtype((batch, x.shape[1], self.capacity, x.shape[3]), x.dtype) for x in (self.keys, self.values)]
        given, options = checked_call(q, *dense, **self._cut(arguments, self.capacity), q_offset=0)
        _, heads, kv_heads, n_q, _, d_k, d_v = options["sizes"]
        on_host = self._if_known() if self.in_place else None
        if on_host is not None:  # pages after the last one in use are not read
            total = max(int(np.flatnonzero(on_host.pages.owners >= 0).max(initial=0)) + 1, 1)
        together = max(1, min(total, NUMBERS // max(heads * n_q * (d_k + d_v), 1)))
        if not self.in_place and heads // kv_heads * n_q <= size:  # few queries; a part of the pool would be a copy
            together = total
        options |= {
            "sizes": Sizes((together,), heads, kv_heads, n_q, size, d_k, d_v),
            "causal": options["causal"] and n_q > 1,  # no key comes after the last position
        }
        del options["q_offset"]
        placed = self._placed({name: x for name, x in given.items() if name not in ("k", "v")})
        arrays = self._by_page(placed.arrays, total, "bias_structure" not in options)
        return self._computed(OPERATION, placed, arrays, {"options": options, "pages": together})

    def _by_page(self, given: dict[str, Array], total: int, bias_by_pair: bool) -> dict[str, Array]:
        """Return the arrays of the operation, with those by entry and key rearranged by page."""
        xp = self.place.backend.namespace()
        counts, owners, numbers = (native(x, self.place) for x in (self.counts, self.owners, self.numbers))
        owners, numbers = owners[:total], numbers[:total]
        entries, everything = xp.clip(owners, 0, None), int(self.keys.shape[0])

        def by_page(x: Array) -> Array:
            """(…, capacity or 1) → (P, h, n_q, page_size or 1)."""
            x = xp.reshape(x, (*(1,) * (4 - x.ndim), *x.shape))
            batch, heads, n_q, width = x.shape
            which = entries if batch > 1 else xp.zeros_like(entries)
            if width > 1:
                x = xp.permute_dims(xp.reshape(x, (batch, heads, n_q, everything, -1)), (0, 3, 1, 2, 4))
                x, which = xp.reshape(x, (batch * everything, heads, n_q, -1)), which * everything + numbers
            return xp.take(x, which, axis=0)

        found = given | {
            "k": self.keys[:total, ...], "v": self.values[:total, ...], "owners": owners, "numbers": numbers,
            "counts": counts,
        }  # fmt: skip
        found |= {name: by_page(given[name]) for name in ("mask", "bias")[: 1 + bias_by_pair] if name in given}
        if "q_segments" in given:
            q_ids, k_ids = given["q_segments"], given["k_segments"]
            q_ids = xp.broadcast_to(q_ids, (counts.shape[0], q_ids.shape[-1]))
            k_ids = by_page(xp.reshape(k_ids, (*k_ids.shape[:-1], 1, 1, k_ids.shape[-1])))
            found |= {"q_segments": xp.take(q_ids, entries, axis=0), "k_segments": xp.reshape(k_ids, (total, -1))}
        return found


class _HostPages(NamedTuple):
    """Lengths and pages as NumPy integers."""

    counts: np.ndarray[Any, np.dtype[np.int32]]
    pages: Pages
