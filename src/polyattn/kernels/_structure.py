"""Biases and masks with structure: a tile of them is computed where it is needed, and none is stored as n_q × n_k.

A structured object holds static numbers alone, so that it can be compared and compiled for. The one kind of array
that a bias may need, a table with a gradient, stands beside it in the problem.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import DTypeError
from ._arrays import Array

if TYPE_CHECKING:
    from ._problem import Problem, Sizes


class StructuredBias:
    """A bias that is computed from where queries and keys stand. Subclasses are frozen dataclasses."""

    table: Array | None = None
    """What the values are taken from, if that is an array."""

    def without_table(self) -> StructuredBias:
        """Return what is static of it."""
        return self

    def expect_fit(self, sizes: Sizes) -> None:
        """Raise where it is not of these sizes."""

    def pairs(self, problem: Problem) -> Array:
        """Return the bias of a problem that is small, a tile as a rule: it broadcasts to (…, H, n_q, n_k)."""
        raise NotImplementedError

    def allowed(self, problem: Problem) -> Array | None:
        """Return where it is not −inf, or None where it is so nowhere."""
        return None

    def gradient(self, dscores: Array, problem: Problem) -> Array | None:
        """Return the gradient of the table from that of all scores (…, H, n_q, n_k), if there is a table."""
        return None


class StructuredMask:
    """A mask that is known before anything is computed. Subclasses are frozen dataclasses."""

    def expect_fit(self, sizes: Sizes) -> None:
        """Raise where it is not of these sizes."""

    def pairs(self, problem: Problem) -> Array:
        """Return which pairs of a small problem may attend; it broadcasts to (…, H, n_q, n_k)."""
        raise NotImplementedError

    def reach(self, problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
        """Say whether it may allow some pair of a tile, and whether it allows all. The last are of the tile too."""
        raise NotImplementedError

    def tile_lengths(self, n_q: int, n_k: int) -> tuple[int, int]:
        """Return how many queries and keys a tile has, these at most: keys a multiple of 4, unless all are at once."""
        return n_q, n_k

    def __and__(self, other: StructuredMask) -> StructuredMask:
        """Allow what both allow."""
        if not isinstance(other, StructuredMask):
            raise DTypeError(f"mask: expected a structured mask on both sides of &, got {type(other).__name__}")
        return BothMasks(self, other)


@dataclass(frozen=True)
class BothMasks(StructuredMask):
    """What two masks allow."""

    one: StructuredMask
    other: StructuredMask

    def expect_fit(self, sizes: Sizes) -> None:
        """Ask both."""
        self.one.expect_fit(sizes)
        self.other.expect_fit(sizes)

    def pairs(self, problem: Problem) -> Array:
        """Return the intersection."""
        return problem.xp.logical_and(self.one.pairs(problem), self.other.pairs(problem))

    def reach(self, problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
        """Say what may be of both, each looked at for itself."""
        (some, all_), (some_other, all_other) = (x.reach(problem, i, i_last, j, j_last) for x in (self.one, self.other))
        return some and some_other, all_ and all_other

    def tile_lengths(self, n_q: int, n_k: int) -> tuple[int, int]:
        """Return what one makes of the tiles of the other."""
        return self.one.tile_lengths(*self.other.tile_lengths(n_q, n_k))


def bias_pairs(problem: Problem) -> Array | None:
    """Return the bias of a problem as an array, computed if it is structured."""
    return problem.bias.pairs(problem) if isinstance(problem.bias, StructuredBias) else problem.bias


def mask_pairs(problem: Problem) -> Array | None:
    """Return the mask of a problem as an array, computed if it is structured."""
    return problem.mask.pairs(problem) if isinstance(problem.mask, StructuredMask) else problem.mask
