"""The keys and values of sequences of very different lengths, in pages of one pool."""

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
"""Of the queries and results of pages that are read together where their queries are many: 4 MiB in float32."""


@dataclass(frozen=True, eq=False, repr=False)
class PagedKVCache(BaseCache):
    """Keys and values in ``pages`` pages of ``page_size`` positions, which all entries of a batch share.

    Its use is that of :class:`KVCache`; make one by :meth:`create`. :meth:`append` gives an entry the next free
    page where its last is full, :meth:`rewind` frees those that it leaves. An entry may be as long as the pool has
    room: ``capacity`` is ``pages · page_size``, and a mask, a bias and the ids of the keys are as wide. Structured
    masks, which know a key by its place among all, and dropout, whose bits do too, are not taken.

    :meth:`attention` reads the pages where they lie and makes no dense copy. On JAX one compiled step serves every
    position, and every way in which the pages are shared out.

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
    """The entry of each page, −1 if it is free; kept like ``counts``."""
    numbers: Array
    """Which of its entry's pages each is."""

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
            Its memory is (pages, kv_heads, page_size, head_dim) for the keys. Large pages, 64 positions and more,
            are read faster; half of one is empty at the end of each entry, on average.
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
        sizes = {"batch": batch, "kv_heads": kv_heads, "pages": pages, "page_size": page_size}
        (batch, kv_heads, pages, page_size), features = sizes_of(head_dim, value_dim, **sizes)
        free, zero = np.full(pages, -1, np.int32), np.zeros(pages, np.int32)
        shape = (pages, kv_heads, page_size)
        return cls._made(batch, shape, features, dtype, backend, device, owners=free, numbers=zero)

    # ---- what it holds ----------------------------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """How many positions a page has."""
        return int(self._fresh().keys.shape[2])

    @property
    def capacity(self) -> int:
        """How many positions there is room for in the pool, whosever they are."""
        return int(self._fresh().keys.shape[0]) * self.page_size

    @property
    def free_pages(self) -> int:
        """How many pages belong to nobody."""
        return int((self._ledger().pages.owners < 0).sum())

    @property
    def table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The pages of each entry in their order, (B, m) on the host, −1 past its last."""
        ledger = self._ledger()
        owners, numbers = ledger.pages
        longest = needed(ledger.counts, self.page_size).max()
        table = np.full((len(ledger.counts), longest), -1, np.int32)
        used = np.flatnonzero(owners >= 0)
        table[owners[used], numbers[used]] = used
        return table

    @property
    def k(self) -> Array:
        """The keys, (B, H_kv, n, d_k), up to the longest entry: gathered into a copy, to be looked at."""
        return self._dense(self._fresh().keys)

    @property
    def v(self) -> Array:
        """The values, (B, H_kv, n, d_v), as :attr:`k`."""
        return self._dense(self._fresh().values)

    def _dense(self, x: Array) -> Array:
        xp, table = self.place.backend.namespace(), np.clip(self.table, 0, None)
        (batch, m), (_, heads, size, d) = table.shape, x.shape
        pages = xp.take(x, native(table.reshape(-1), self.place), axis=0)  # (B · m, H_kv, size, d)
        dense = xp.permute_dims(xp.reshape(pages, (batch, m, heads, size, d)), (0, 2, 1, 3, 4))
        return xp.reshape(dense, (batch, heads, m * size, d))[:, :, : int(self._ledger().counts.max()), :]

    def _ledger(self) -> _Ledger:
        """Return what says where positions are, on the host."""
        found = self._if_known()
        if found is None:
            raise ArgumentError("cache: its lengths are traced, and its pages are not known here")
        return found

    def _if_known(self) -> _Ledger | None:
        self._fresh()
        counts, owners, numbers = (known(x, self.place) for x in (self.counts, self.owners, self.numbers))
        if counts is None or owners is None or numbers is None:
            return None
        return _Ledger(counts, Pages(owners, numbers))

    # ---- append and rewind --------------------------------------------------------------------------------------

    def _grown(self, n: int) -> dict[str, Any]:
        size, ledger = self.page_size, self._if_known()
        if ledger is None:
            xp, place = self.place.backend.namespace(), self.place
            counts, *pages = (native(x, place) for x in (self.counts, self.owners, self.numbers))
            return {"counts": counts + n, **Pages(*pages).allotted(xp, counts, n, size)._asdict()}
        wanted = int(needed(ledger.counts + n, size).sum())
        total = len(ledger.pages.owners)
        if wanted > total:
            raise ArgumentError(
                f"k: expected positions that the free pages have room for: {n} more for each entry make {wanted} "
                f"pages of {size}, and the pool has {total}; the entries hold {ledger.counts.tolist()}"
            )
        allotted = ledger.pages.allotted(host, ledger.counts, n, size)
        return {"counts": np.asarray(ledger.counts + n, dtype=np.int32), **allotted._asdict()}

    def _cut_back(self, name: str, given: Any) -> dict[str, Any]:
        counts = rewound(self.counts, name, given, self.place)
        kept, ledger = known(counts, self.place), self._if_known()
        if kept is not None and ledger is not None:
            return {"counts": counts, **ledger.pages.freed(host, kept, self.page_size)._asdict()}
        xp, (lengths, *pages) = (
            self.place.backend.namespace(),
            (native(x, self.place) for x in (counts, self.owners, self.numbers)),
        )
        return {"counts": lengths, **Pages(*pages).freed(xp, lengths, self.page_size)._asdict()}

    def _written(self, k: Array, v: Array, following: dict[str, Any]) -> tuple[Array, Array]:
        """Write each entry's part of each page that it reaches."""
        ledger, size, n = self._if_known(), self.page_size, int(k.shape[2])
        pages, reached = Pages(following["owners"], following["numbers"]), (n + 2 * size - 2) // size
        if ledger is None:
            xp, counts = self.place.backend.namespace(), native(self.counts, self.place)
        else:
            xp, counts = host, ledger.counts
        entries = xp.arange(counts.shape[0], dtype=xp.int32)
        numbers = (counts // size)[:, None] + xp.arange(reached, dtype=xp.int32)[None, :]  # (B, reached)
        found, there = pages.located(xp, entries, numbers)
        if ledger is not None and self.in_place:
            return self._written_in_place(k, v, ledger.counts.tolist(), found.tolist())
        begins = numbers * size - counts[:, None]  # which of the new positions is a page's first
        begins = xp.where(there, begins, xp.full_like(begins, n))  # no page: nothing to be written
        whose = xp.broadcast_to(entries[:, None], numbers.shape)
        steps = (native(xp.reshape(x, (-1,)), self.place) for x in (found, begins, whose))
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
                    if written is not view:  # where autograd follows, nothing is written in place
                        memory[i] = put(memory[i], written, page, 0)
                first = stop
        return memory[0], memory[1]

    # ---- attention ----------------------------------------------------------------------------------------------

    def _attended(self, q: Array, arguments: dict[str, Any]) -> Array:
        batch, total, size = self.counts.shape[0], self.keys.shape[0], self.page_size
        expect_shape("q", q, (batch, *q.shape[-3:]))
        if isinstance(arguments.get("mask"), StructuredMask):
            raise ArgumentError(
                f"mask: expected an array as wide as the capacity, {self.capacity}, got "
                f"{type(arguments['mask']).__name__}, which knows a key by its place among all; these are in pages"
            )
        # What there would be if the pages lay side by side: the arguments are checked against it.
        dense = [ShapeDtype((batch, x.shape[1], self.capacity, x.shape[3]), x.dtype) for x in (self.keys, self.values)]
        given, options = checked_call(q, *dense, **self._cut(arguments, self.capacity), q_offset=0)
        _, heads, kv_heads, n_q, _, d_k, d_v = options["sizes"]
        ledger = self._if_known() if self.in_place else None
        if ledger is not None:  # pages that lie behind all that belong to somebody need not be read
            total = max(int(np.flatnonzero(ledger.pages.owners >= 0).max(initial=0)) + 1, 1)
        together = max(1, min(total, NUMBERS // max(heads * n_q * (d_k + d_v), 1)))
        if not self.in_place and heads // kv_heads * n_q <= size:  # queries are few, and a part of the pool is a copy
            together = total
        options |= {
            "sizes": Sizes((together,), heads, kv_heads, n_q, size, d_k, d_v),
            "causal": options["causal"] and n_q > 1,  # nothing comes after the last position
        }
        del options["q_offset"]
        placed = self._placed({name: x for name, x in given.items() if name not in ("k", "v")})
        arrays = self._by_page(placed.arrays, total, "bias_structure" not in options)
        return self._computed(OPERATION, placed, arrays, {"options": options, "pages": together})

    def _by_page(self, given: dict[str, Array], total: int, bias_by_pair: bool) -> dict[str, Array]:
        """Return the arrays of the operation: what is given by entry and key, by page."""
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


class _Ledger(NamedTuple):
    """Lengths and pages as NumPy's integers."""

    counts: np.ndarray[Any, np.dtype[np.int32]]
    pages: Pages
