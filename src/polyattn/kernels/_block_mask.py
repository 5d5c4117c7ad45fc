"""Block-sparse masks: they allow or exclude whole blocks of queries and keys."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ShapeError
from ._arrays import Array, broadcasts
from ._masks import as_int32
from ._problem import Problem, Sizes
from ._static import concrete, constant_result
from ._structure import StructuredMask

LEAST = 64  # the smallest number of queries, and of keys, in a tile


@dataclass(frozen=True)
class BlockMask(StructuredMask):
    """One bit for each block. ``grid`` is (…, H, blocks of queries, blocks of keys); leading axes may be 1."""

    grid: tuple[int, ...]
    bits: bytes
    block_size: tuple[int, int]

    def expect_fit(self, sizes: Sizes) -> None:
        """Require blocks for all queries and keys; the last block may be partial."""
        *lead, n_q, n_k = self.grid
        want = tuple(-(-n // size) for n, size in zip((sizes.n_q, sizes.n_k), self.block_size, strict=True))
        if (n_q, n_k) != want or not broadcasts(tuple(lead), (*sizes.batch, sizes.heads)):
            raise ShapeError(
                f"mask: expected blocks that broadcast to {(*sizes.batch, sizes.heads, *want)} for {sizes.n_q} queries "
                f"and {sizes.n_k} keys in blocks of {self.block_size}, got {self.grid}"
            )

    def pairs(self, problem: Problem) -> Array:
        """Return the bit of each pair's block."""
        xp, lengths = problem.xp, (problem.sizes.n_q, problem.sizes.n_k)
        spans = tuple([  # only the blocks of the tile go to the device
            (start // size, (start + length - 1) // size + 1) if isinstance(start, int) else (0, count)
            for start, length, size, count in zip(problem.origin, lengths, self.block_size, self.grid[-2:], strict=True)
        ])  # fmt: skip
        blocks = blocks_of(self.bits, concrete(self.grid), concrete(spans))
        pairs = xp.asarray(blocks, dtype=xp.bool, device=problem.native_device)
        for axis, start, length, size in zip((-2, -1), problem.origin, lengths, self.block_size, strict=True):
            first = start % size if isinstance(start, int) else as_int32(problem, start)
            places = xp.add(xp.arange(length, dtype=xp.int32, device=problem.native_device), first)
            pairs = xp.take(pairs, xp.floor_divide(places, size), axis=pairs.ndim + axis)
        return pairs

    def reach(self, problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
        """Check whether any block of the tile is set, and whether all are."""
        rows, columns = self.block_size
        spans = (i // rows, i_last // rows + 1), (j // columns, j_last // columns + 1)
        return any_and_all(self.bits, concrete(self.grid), concrete(spans))

    def tile_lengths(self, n_q: int, n_k: int) -> tuple[int, int]:
        """Return small tiles, so that more of them can be skipped, but of at least ``LEAST`` queries and keys."""
        steps = (math.lcm(size, 4) for size in concrete(self.block_size))
        few_q, few_k = (step * -(-LEAST // step) for step in steps)
        return min(n_q, few_q), min(n_k, few_k)


@constant_result
def blocks_of(bits: bytes, grid: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> Any:
    """Return the blocks of these rows and columns as nested lists."""
    return _cut(bits, grid, spans).tolist()


@constant_result
def any_and_all(bits: bytes, grid: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> tuple[bool, bool]:
    """Return whether any of the blocks in these rows and columns is set, and whether all are."""
    blocks = _cut(bits, grid, spans)
    return bool(blocks.any()), bool(blocks.all())


def _cut(bits: bytes, grid: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> Any:
    (first_row, stop_row), (first_column, stop_column) = spans
    return _unpacked(bits, grid)[..., first_row:stop_row, first_column:stop_column]


@functools.lru_cache(maxsize=16)  # each tile of a mask needs it
def _unpacked(bits: bytes, grid: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the bits as an array on the host."""
    unpacked = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=math.prod(grid))
    return unpacked.astype(np.bool_).reshape(grid)
