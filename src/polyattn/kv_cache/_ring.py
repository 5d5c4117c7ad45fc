"""Where positions lie in a sliding cache: the first few stay, the others go round in a ring."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..backend import Array

__all__ = ["Ring"]


class Ring(NamedTuple):
    """Positions below ``first`` have a slot each; behind these every ``length`` positions take the same slots."""

    first: int
    length: int

    @property
    def slots(self) -> int:
        """How many there are."""
        return self.first + self.length

    def slot(self, xp: Any, position: Array) -> Array:
        """Return where positions are written."""
        return xp.where(position < self.first, position, self.first + (position - self.first) % self.length)

    def positions(self, xp: Any, slots: Array, lengths: Array) -> Array:
        """Return what slots (m,) hold once ``lengths`` (B,) positions were written: (B, m), −1 for nothing."""
        behind = lengths[:, None] - 1 - slots[None, :]  # (B, m); below 0 where the slot was not reached
        turns = xp.where(slots[None, :] < self.first, xp.zeros_like(behind), behind // self.length)
        return xp.where(behind < 0, xp.full_like(behind, -1), slots[None, :] + turns * self.length)

    def runs(self, starts: NDArray[np.int32], n: int) -> list[tuple[int, int]]:
        """Return the parts of n new positions that lie side by side in every entry's slots and will not be lost."""
        new = starts[:, None] + np.arange(n + 1)  # (B, n + 1)
        at = self.slot(np, new)
        breaks = np.flatnonzero((np.diff(at[:, :-1], axis=1) != 1).any(axis=0)) + 1
        ends = [0, *breaks.tolist(), n]
        stays = (new < self.first) | (new >= new[:, -1:] - self.length)  # (B, n + 1)
        return [(a, b) for a, b in itertools.pairwise(ends) if stays[:, a:b].any()]
