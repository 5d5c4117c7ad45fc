"""The mask of a prefix language model: everything sees the prefix, and what follows it is causal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ShapeError
from ._arrays import Array
from ._masks import distances, key_positions
from ._problem import Problem, Sizes
from ._structure import StructuredMask


@dataclass(frozen=True)
class PrefixMask(StructuredMask):
    """Keys of the prefix, and keys at positions up to the query's own."""

    lengths: tuple[int, ...]
    axes: tuple[int, ...] = ()
    """The batch axes that the lengths have."""

    def expect_fit(self, sizes: Sizes) -> None:
        """Require lengths for the batch; a prefix may be longer than the keys so far."""
        pairs = zip(reversed(self.axes), reversed(sizes.batch), strict=False)
        if len(self.axes) > len(sizes.batch) or any(n not in (1, m) for n, m in pairs):
            raise ShapeError(
                f"mask: expected prefix lengths that broadcast to the axes before the heads {sizes.batch}, "
                f"got {self.axes}"
            )

    def pairs(self, problem: Problem) -> Array:
        """Compare keys with the prefix, and with the query."""
        xp = problem.xp
        host = np.asarray(self.lengths, dtype=np.int32).reshape(*self.axes, 1, 1, 1)
        lengths = problem.backend.asarray(host, problem.device, None)
        in_prefix = xp.less(key_positions(problem), lengths)  # (…, 1, 1, n_k)
        return xp.logical_or(in_prefix, xp.less_equal(distances(problem), 0))  # (…, 1, n_q, n_k)

    def reach(self, problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
        """Compare the ends of the tile."""
        shortest, longest = min(self.lengths), max(self.lengths)
        if not isinstance(problem.q_offset, int):
            return True, j_last < shortest
        return j < longest or j <= i_last + problem.q_offset, j_last < shortest or j_last <= i + problem.q_offset
