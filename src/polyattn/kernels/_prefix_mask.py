"""The mask of a prefix language model: all queries see the prefix; the keys after it are causal."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ShapeError
from ._arrays import Array, broadcasts
from ._masks import distances, key_positions
from ._problem import Problem, Sizes
from ._structure import StructuredMask


@dataclass(frozen=True)
class PrefixMask(StructuredMask):
    """Allow the keys of the prefix and the keys up to the position of the query."""

    lengths: tuple[int, ...]
    axes: tuple[int, ...] = ()
    """The shape of the lengths, which broadcasts to the batch axes."""

    def expect_fit(self, sizes: Sizes) -> None:
        """Require lengths that broadcast to the batch; a prefix may be longer than the keys."""
        if not broadcasts(self.axes, sizes.batch):
            raise ShapeError(
                f"mask: expected prefix lengths that broadcast to the axes before the heads {sizes.batch}, "
                f"got {self.axes}"
            )

    def pairs(self, problem: Problem) -> Array:
        """Compare the positions of keys with the prefix length and with the positions of queries."""
        xp = problem.xp
        lengths = xp.asarray(self.lengths, dtype=xp.int32, device=problem.native_device)
        lengths = xp.reshape(lengths, (*self.axes, 1, 1, 1))
        in_prefix = xp.less(key_positions(problem), lengths)  # (…, 1, 1, n_k)
        return xp.logical_or(in_prefix, xp.less_equal(distances(problem), 0))  # (…, 1, n_q, n_k)

    def reach(self, problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
        """Compare the first and last positions of the tile."""
        shortest, longest = min(self.lengths), max(self.lengths)
        if not isinstance(problem.q_offset, int):
            return True, j_last < shortest
        return j < longest or j <= i_last + problem.q_offset, j_last < shortest or j_last <= i + problem.q_offset
