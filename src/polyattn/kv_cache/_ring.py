"""The memory layout of a sliding cache: fixed slots for the first positions, a ring buffer for the others."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backend import Array

__all__ = ["Ring"]


class Ring(NamedTuple):
    """A slot for each position below ``first``, followed by a ring buffer of ``length`` slots for the others."""

    first: int
    length: int

    @property
    def slots(self) -> int:
        """The number of slots."""
        return self.first + self.length

    def slot(self, xp: Any, position: Array) -> Array:
        """Return the slots of positions."""
        return xp.where(position < self.first, position, self.first + (position - self.first) % self.length)

    def positions(self, xp: Any, slots: Array, lengths: Array) -> Array:
        """Return the positions in slots (m,) after ``lengths`` (B,) positions were written: (B, m), −1 if empty."""
        behind = lengths[:, None] - 1 - slots[None, :]  # (B, m); below 0 if nothing was written to the slot
        rounds = xp.where(slots[None, :] < self.first, xp.zeros_like(behind), behind // self.length)
        return xp.where(behind < 0, xp.full_like(behind, -1), slots[None, :] + rounds * self.length)

    def runs(self, starts: NDArray[np.int32], n: int) -> list[tuple[int, int]]:
        """Return the ranges of n new positions with consecutive slots in every entry, without overwritten ones."""
        if n == 1:
            return [(0, 1)]
        new = starts[:, None] + np.arange(n + 1)  # (B, n + 1)
        at = self.slot(np, new)
        breaks = np.flatnonzero((np.diff(at[:, :-1], axis=1) != 1).any(axis=0)) + 1
        ends = [0, *breaks.tolist(), n]
        stays = (new < self.first) | (new >= new[:, -1:] - self.length)  # (B, n + 1)
        return [(a, b) for a, b in itertools.pairwise(ends) if stays[:, a:b].any()]
