"""Which entry each page of a pool belongs to, and which of its pages it is: pages are given out and come back.

That is all there is to keep. What is free follows from it, and so does the table of an entry's pages.
The functions are the same on NumPy's integers and on traced ones; no shape depends on a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array
from ..kernels import cast

__all__ = ["Pages", "needed"]


class Pages(NamedTuple):
    """For each page its entry, −1 if it is free, and its number among the entry's pages: int32 (P,)."""

    owners: Array
    numbers: Array

    def allotted(self, xp: Any, counts: Array, n: int, size: int) -> Pages:
        """Return the pages with those that n more positions need: the first that are free, while there are any."""
        have = needed(counts, size)
        wanted = needed(counts + n, size) - have  # (B,)
        ends = xp.cumulative_sum(wanted, dtype=xp.int32)  # the requests in a row
        free = self.owners < 0
        rank = xp.cumulative_sum(cast(xp, free, xp.int32), dtype=xp.int32) - 1  # (P,): which request a free page serves
        taker = xp.sum(cast(xp, rank[:, None] >= ends[None, :], xp.int32), axis=1, dtype=xp.int32)
        taken = xp.logical_and(free, taker < counts.shape[0])
        taker = xp.clip(taker, None, counts.shape[0] - 1)
        number = rank + xp.take(have - ends + wanted, taker, axis=0)
        return Pages(xp.where(taken, taker, self.owners), xp.where(taken, number, self.numbers))

    def freed(self, xp: Any, counts: Array, size: int) -> Pages:
        """Return the pages without those behind the ends of their entries."""
        lengths = xp.take(counts, xp.clip(self.owners, 0, None), axis=0)
        kept = self.numbers * size < lengths  # (P,)
        return Pages(xp.where(kept, self.owners, xp.full_like(self.owners, -1)), self.numbers)

    def located(self, xp: Any, entries: Array, numbers: Array) -> tuple[Array, Array]:
        """Return the pages of entries (B,) that have these numbers (B, m), and whether there is one."""
        match = xp.logical_and(self.owners == entries[:, None, None], self.numbers == numbers[:, :, None])  # (B, m, P)
        return xp.argmax(cast(xp, match, xp.int32), axis=-1), xp.any(match, axis=-1)


def needed(counts: Array, size: int) -> Array:
    """Return how many pages lengths take."""
    return (counts + (size - 1)) // size
