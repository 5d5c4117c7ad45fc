"""The cells of a chunked attention problem: for each, its own smaller problem, whose positions are relative to it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import KernelUnsupportedError, ShapeError
from ...kernels import (
    AlibiBias,
    BlockMask,
    BothMasks,
    PrefixMask,
    Problem,
    Sizes,
    StructuredBias,
    StructuredMask,
    reach,
)

LIMIT = 2**62

__all__ = ["Cell", "Part", "Span", "has_pairs", "part_of"]


class Span(NamedTuple):
    """A chunk of an axis: the indices from ``start`` up to ``stop``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of indices."""
        return self.stop - self.start


class Cell(NamedTuple):
    """The scores of one chunk of the batch, heads, queries and keys."""

    batch: tuple[Span, ...]
    heads: Span
    queries: Span
    keys: Span


class Part(NamedTuple):
    """The static part of the problem of a cell. A task adds the arrays of its chunks and their library."""

    problem: Problem
    cell: Cell
    whole: Sizes


def part_of(problem: Problem, cell: Cell) -> Part:
    """Return the problem of a cell, given the static arguments of the whole problem.

    ``q_offset`` and ``key_lengths`` may be NumPy arrays: of these, the cell has its own entries. They are None if their
    values are in the chunks of a Dask array.
    """
    sizes, groups = problem.sizes, problem.sizes.heads // max(problem.sizes.kv_heads, 1)
    own = Sizes(
        tuple(span.length for span in cell.batch), cell.heads.length, max(cell.heads.length // groups, 1),
        cell.queries.length, cell.keys.length, sizes.d_k, sizes.d_v,
    )  # fmt: skip
    part = replace(
        problem,
        sizes=own,
        q_offset=_moved(_own(problem.q_offset, cell), cell.queries.start - cell.keys.start),
        key_lengths=_moved(_own(problem.key_lengths, cell), -cell.keys.start, least=0),
        mask=_own_mask(problem.mask, cell) if isinstance(problem.mask, StructuredMask) else None,
        bias=_own_bias(problem.bias, cell) if isinstance(problem.bias, StructuredBias) else None,
    )
    return Part(part, cell, sizes)


def has_pairs(part: Part) -> bool:
    """Return whether static arguments leave any pair of a query and a key of the part."""
    problem = part.problem
    last = (problem.sizes.n_q - 1, problem.sizes.n_k - 1)
    offsets, lengths = (_values(x) for x in (problem.q_offset, problem.key_lengths))
    return any(
        reach(replace(problem, q_offset=offset, key_lengths=length), 0, last[0], 0, last[1])[0]
        for offset in offsets
        for length in lengths
    )


def _values(x: Any) -> list[Any]:
    """Return the different values of an argument, or a value that is not known, which excludes nothing."""
    return np.unique(x).tolist() if isinstance(x, np.ndarray) else [x]


def _own(x: Any, cell: Cell) -> Any:
    """Return the entries of integers over the batch that are in a cell: a Python integer if they are equal."""
    if not isinstance(x, np.ndarray):
        return x
    spans = cell.batch[len(cell.batch) - x.ndim :]
    entries = tuple(slice(0, 1) if n == 1 else slice(*span) for n, span in zip(x.shape, spans, strict=True))
    own = x[entries].astype(np.int64)
    return int(own.flat[0]) if own.size and (own == own.flat[0]).all() else own


def _moved(x: Any, by: int, least: int = -LIMIT) -> Any:
    """Return integers relative to a cell; None, for integers that the graph does not know, is unchanged."""
    if isinstance(x, int):
        return max(x + by, least)
    return x if x is None else np.maximum(x + by, least)


def _own_mask(mask: StructuredMask, cell: Cell) -> StructuredMask:
    if isinstance(mask, BothMasks):
        return BothMasks(_own_mask(mask.one, cell), _own_mask(mask.other, cell))
    if isinstance(mask, PrefixMask):
        lengths = np.asarray(_own(np.asarray(mask.lengths).reshape(mask.axes), cell)) - cell.keys.start
        return PrefixMask(tuple(np.maximum(lengths, 0).ravel().tolist()), lengths.shape)
    if isinstance(mask, BlockMask):
        return _own_blocks(mask, cell)
    raise KernelUnsupportedError(f"mask: a {type(mask).__name__} cannot be cut into chunks; pass an array of booleans")


def _own_blocks(mask: BlockMask, cell: Cell) -> BlockMask:
    lead = (*cell.batch, cell.heads)[len(cell.batch) + 3 - len(mask.grid) :]
    entries = [slice(0, 1) if n == 1 else slice(*span) for n, span in zip(mask.grid[:-2], lead, strict=True)]
    named = zip(("queries", "keys"), (cell.queries, cell.keys), mask.block_size, strict=True)
    for name, span, size in named:
        if span.start % size:
            raise ShapeError(
                f"mask: expected chunks of {name} that start at multiples of the block size {size}, got one that "
                f"starts at {span.start}; rechunk the {name} to a multiple of {size}"
            )
        entries.append(slice(span.start // size, -(-span.stop // size)))
    bits = np.unpackbits(np.frombuffer(mask.bits, dtype=np.uint8), count=math.prod(mask.grid))
    own = bits.astype(np.bool_).reshape(mask.grid)[tuple(entries)]
    return BlockMask(own.shape, np.packbits(own).tobytes(), mask.block_size)


def _own_bias(bias: StructuredBias, cell: Cell) -> StructuredBias:
    return AlibiBias(bias.slopes[slice(*cell.heads)]) if isinstance(bias, AlibiBias) else bias
