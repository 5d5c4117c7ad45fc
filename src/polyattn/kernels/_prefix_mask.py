"""The mask of a prefix language model: everything sees the prefix, and what follows it is causal."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ShapeError
from ._arrays import Array, broadcasts
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
        if not broadcasts(self.axes, sizes.batch):
            raise ShapeError(
                f"mask: expected prefix lengths that broadcast to the axes before the heads {sizes.batch}, "
                f"got {self.axes}"
            )

    def pairs(self, problem: Problem) -> Array:
        """Compare keys with the prefix, and with the query."""
        xp = problem.xp
        lengths = xp.asarray(self.lengths, dtype=xp.int32, device=problem.native_device)
        lengths = xp.reshape(lengths, (*self.axes, 1, 1, 1))
        in_prefix = xp.less(key_positions(problem), lengths)  # (…, 1, 1, n_k)
        return xp.logical_or(in_prefix, xp.less_equal(distances(problem), 0))  # (…, 1, n_q, n_k)

    def reach(self, problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
        """Compare the ends of the tile."""
        shortest, longest = min(self.lengths), max(self.lengths)
        if not isinstance(problem.q_offset, int):
            return True, j_last < shortest
        return j < longest or j <= i_last + problem.q_offset, j_last < shortest or j_last <= i + problem.q_offset
