"""The memory of a cache in which each entry's positions lie side by side."""

from __future__ import annotations

from dataclasses import dataclass

from ..backend import Array
from ._base import BaseCache
from ._lengths import known

__all__ = ["InOrderCache"]


@dataclass(frozen=True, eq=False, repr=False)
class InOrderCache(BaseCache):
    """Keys and values (B, H_kv, capacity, d), written from the front on."""

    @property
    def k(self) -> Array:
        """The keys as they lie in memory, (B, H_kv, n, d_k): a view up to the longest entry.

        Where lengths are traced it goes up to the capacity.
        """
        return self._fresh().keys[:, :, : self._end(), :]

    @property
    def v(self) -> Array:
        """The values, (B, H_kv, n, d_v), as :attr:`k`."""
        return self._fresh().values[:, :, : self._end(), :]

    def _end(self) -> int | None:
        """Return how much of the memory is written, None where that is not known."""
        held = known(self.counts, self.place)
        return None if held is None else min(int(held.max()), self.capacity)

    def _read(self) -> int:
        """Return how much of the memory attention reads: all of it where each new length would be compiled anew."""
        end = self._end() if self.in_place else None
        return self.capacity if end is None else end
