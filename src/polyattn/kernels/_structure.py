"""Structured biases and masks: each tile is computed when it is needed, and no n_q × n_k array is stored.

A structured object holds only static numbers, so that it can be compared and be a constant of a compiled program. The
only array that a bias may have is a table with a gradient, which the problem holds in a field of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import DTypeError
from ._arrays import Array

if TYPE_CHECKING:
    from ._problem import Problem, Sizes


class StructuredBias:
    """A bias that is computed from the positions of queries and keys. Subclasses are frozen dataclasses."""

    table: Array | None = None
    """The array of the values of the bias, if it has one."""

    def without_table(self) -> StructuredBias:
        """Return the bias without its table: its static fields."""
        return self

    def expect_fit(self, sizes: Sizes) -> None:
        """Raise where it is not of these sizes."""

    def pairs(self, problem: Problem) -> Array:
        """Return the bias of a small problem, usually a tile, as an array that broadcasts to (…, H, n_q, n_k)."""
        raise NotImplementedError

    def allowed(self, problem: Problem) -> Array | None:
        """Return an array that is False where the bias is −inf, or None if it is −inf nowhere."""
        return None

    def gradient(self, dscores: Array, problem: Problem) -> Array | None:
        """Return the gradient of the table, given that of the scores (…, H, n_q, n_k); None without a table."""
        return None


class StructuredMask:
    """A mask that is static: known before anything is computed. Subclasses are frozen dataclasses."""

    def expect_fit(self, sizes: Sizes) -> None:
        """Raise where it is not of these sizes."""

    def pairs(self, problem: Problem) -> Array:
        """Return the mask of a small problem as a boolean array that broadcasts to (…, H, n_q, n_k)."""
        raise NotImplementedError

    def reach(self, problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
        """Return whether it may allow any pair of a tile, and whether it allows all; i_last, j_last are in the tile."""
        raise NotImplementedError

    def tile_lengths(self, n_q: int, n_k: int) -> tuple[int, int]:
        """Return the tile lengths, at most these. The keys of a tile are a multiple of 4, or all keys."""
        return n_q, n_k

    def __and__(self, other: StructuredMask) -> StructuredMask:
        """Return the mask of the pairs that both masks allow."""
        if not isinstance(other, StructuredMask):
            raise DTypeError(f"mask: expected a structured mask on both sides of &, got {type(other).__name__}")
        return BothMasks(self, other)


@dataclass(frozen=True)
class BothMasks(StructuredMask):
    """The pairs that both of two masks allow."""

    one: StructuredMask
    other: StructuredMask

    def expect_fit(self, sizes: Sizes) -> None:
        """Raise if either mask does not fit these sizes."""
        self.one.expect_fit(sizes)
        self.other.expect_fit(sizes)

    def pairs(self, problem: Problem) -> Array:
        """Return the logical and of both masks."""
        return problem.xp.logical_and(self.one.pairs(problem), self.other.pairs(problem))

    def reach(self, problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
        """Combine the answers of both masks; the first may be True although their pairs are disjoint."""
        (some, all_), (some_other, all_other) = (x.reach(problem, i, i_last, j, j_last) for x in (self.one, self.other))
        return some and some_other, all_ and all_other

    def tile_lengths(self, n_q: int, n_k: int) -> tuple[int, int]:
        """Return the tile lengths of the first mask, at most those of the other."""
        return self.one.tile_lengths(*self.other.tile_lengths(n_q, n_k))


def bias_pairs(problem: Problem) -> Array | None:
    """Return the bias of a problem as an array, and compute it if it is structured."""
    return problem.bias.pairs(problem) if isinstance(problem.bias, StructuredBias) else problem.bias


def mask_pairs(problem: Problem) -> Array | None:
    """Return the mask of a problem as an array, and compute it if it is structured."""
    return problem.mask.pairs(problem) if isinstance(problem.mask, StructuredMask) else problem.mask
