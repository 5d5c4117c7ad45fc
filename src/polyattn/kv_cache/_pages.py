"""Allocation of the pages of a pool: the entry that owns each page, and its index among the entry's pages.

The free pages and the page table follow from these. The functions work on NumPy integers and on traced ones; no shape
depends on a value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ..backend import Array, Backend
from ..kernels import cast

__all__ = ["Pages", "needed", "writer"]


class Pages(NamedTuple):
    """For each page the entry that owns it, −1 if it is free, and its index among the entry's pages: int32 (P,)."""

    owners: Array
    numbers: Array

    def allotted(self, xp: Any, counts: Array, n: int, size: int) -> Pages:
        """Return the pages after n more positions for each entry; they take the first free pages."""
        have = needed(counts, size)
        wanted = needed(counts + n, size) - have  # (B,)
        ends = xp.cumulative_sum(wanted, dtype=xp.int32)  # the end of each entry's requests
        free = self.owners < 0
        rank = xp.cumulative_sum(cast(xp, free, xp.int32), dtype=xp.int32) - 1  # (P,): the request of a free page
        taker = xp.sum(cast(xp, rank[:, None] >= ends[None, :], xp.int32), axis=1, dtype=xp.int32)
        taken = xp.logical_and(free, taker < counts.shape[0])
        taker = xp.clip(taker, None, counts.shape[0] - 1)
        number = rank + xp.take(have - ends + wanted, taker, axis=0)
        return Pages(xp.where(taken, taker, self.owners), xp.where(taken, number, self.numbers))

    def freed(self, xp: Any, counts: Array, size: int) -> Pages:
        """Return the pages, freeing those after the ends of their entries."""
        lengths = xp.take(counts, xp.clip(self.owners, 0, None), axis=0)
        kept = self.numbers * size < lengths  # (P,)
        return Pages(xp.where(kept, self.owners, xp.full_like(self.owners, -1)), self.numbers)

    def located(self, xp: Any, entries: Array, numbers: Array) -> tuple[Array, Array]:
        """Return the pages of entries (B,) with these indices (B, m), and whether they exist."""
        match = xp.logical_and(self.owners == entries[:, None, None], self.numbers == numbers[:, :, None])  # (B, m, P)
        return xp.argmax(cast(xp, match, xp.int32), axis=-1), xp.any(match, axis=-1)


def needed(counts: Array, size: int) -> Array:
    """Return the number of pages for each length."""
    return (counts + (size - 1)) // size


# ---- writing to pages that are traced: one whole page at a time ----


@functools.lru_cache(maxsize=64)
def writer(backend: Backend, device: str | None) -> Callable[..., tuple[Array, Array]]:
    """Return :func:`_written`, compiled if the library compiles."""
    return backend.jit(functools.partial(_written, backend, device))


def _written(
    backend: Backend, device: str | None, keys: Array, values: Array, k: Array, v: Array, pages: Array, begins: Array,
    entries: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """Return the memory with new positions written; each step writes those of one entry that fall into one page.

    ``begins`` has for each step the index, which may be negative, of the new position in a page's first slot.
    """
    xp, n = backend.namespace(), int(k.shape[2])
    row = xp.arange(keys.shape[2], dtype=xp.int32, device=backend.native_device(device))

    def one(memory: Any, i: Any) -> tuple[Any, tuple[()]]:
        page, begin, entry = (x[i, ...] for x in (pages, begins, entries))
        number = begin + row  # the index of the new position in each slot of the page
        new, number = xp.logical_and(number >= 0, number < n), xp.clip(number, 0, n - 1)

        def put(x: Array, given: Array) -> Array:
            given = xp.take(given, xp.reshape(entry, (1,)), axis=0)  # (1, H_kv, n, d)
            block = xp.take(x, xp.reshape(page, (1,)), axis=0)  # (1, H_kv, size, d)
            block = xp.where(new[None, None, :, None], xp.take(given, number, axis=2), block)
            return backend.update_slice(x, block, page, 0)

        return (put(memory[0], k), put(memory[1], v)), ()

    (keys, values), _ = backend.scan(one, (keys, values), int(pages.shape[0]))
    return keys, values
