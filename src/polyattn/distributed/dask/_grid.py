"""The chunks of a problem: which chunk of each array a cell needs, and the checks that chunks fit together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ...errors import ShapeError
from ...kernels import Array, Sizes
from ._cells import Cell, Span

__all__ = ["AXES", "Grid", "expect_fit", "expect_known", "grid_of"]

Index = tuple[int, ...]
"""The chunk of each batch axis, of the heads and of the queries."""
Chunks = tuple[tuple[int, ...], ...]

AXES: dict[str, tuple[str, ...]] = {
    "q": ("heads", "queries", "features"),
    "k": ("kv_heads", "keys", "features"),
    "v": ("kv_heads", "keys", "features"),
    "dout": ("heads", "queries", "features"),
    "out": ("heads", "queries", "features"),
    "largest": ("heads", "queries"),
    "log_total": ("heads", "queries"),
    "dlse": ("heads", "queries"),
    "mask": ("heads", "queries", "keys"),
    "bias": ("heads", "queries", "keys"),
    "table": ("features", "heads"),
    "sinks": ("heads",),
    "q_segments": ("queries",),
    "k_segments": ("keys",),
    "q_offset": (),
    "key_lengths": (),
    "seed": (),
}
"""The last axes of each array; the axes before them are those of the batch."""


class Grid(NamedTuple):
    """The chunks of the axes of a problem."""

    batch: Chunks
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]

    def rows(self) -> Iterator[Index]:
        """Yield the index of each chunk of the result."""
        counts = (len(chunks) for chunks in (*self.batch, self.heads, self.queries))
        return itertools.product(*map(range, counts))

    def cell(self, row: Index, j: int) -> Cell:
        """Return the cell of a chunk of rows and the chunk ``j`` of the keys."""
        *batch, head, query = row
        spans = tuple(_span(chunks, b) for chunks, b in zip(self.batch, batch, strict=True))
        return Cell(spans, _span(self.heads, head), _span(self.queries, query), _span(self.keys, j))

    def chunks(self, name: str, shape: tuple[int, ...]) -> Chunks:
        """Return the chunks that an array must have: those of the axes of the problem, or one where it broadcasts."""
        return tuple(
            (n,) if n == 1 or axis == "features" else self.batch[axis] if isinstance(axis, int) else getattr(self, axis)
            for n, axis in zip(shape, self._axes(name, len(shape)), strict=True)
        )

    def block(self, name: str, shape: tuple[int, ...], row: Index, j: int) -> Index:
        """Return the index of the chunk of an array that a cell needs."""
        *batch, head, query = row
        numbers = {"heads": head, "kv_heads": min(head, len(self.kv_heads) - 1), "queries": query, "keys": j}
        return tuple(
            0 if n == 1 or axis == "features" else batch[axis] if isinstance(axis, int) else numbers[axis]
            for n, axis in zip(shape, self._axes(name, len(shape)), strict=True)
        )

    def _axes(self, name: str, ndim: int) -> list[int | str]:
        """Return the axis of the problem of each axis of an array: a number for the batch."""
        return [*range(len(self.batch)), *AXES[name]][len(self.batch) + len(AXES[name]) - ndim :]


def _span(chunks: tuple[int, ...], i: int) -> Span:
    start = sum(chunks[:i])
    return Span(start, start + chunks[i])


def grid_of(sizes: Sizes, q: Array, k: Array, v: Array) -> Grid:
    """Return the chunks of a problem: those of q, and of the keys of k.

    Raises
    ------
    ShapeError
        If a chunk is empty or has an unknown size, if the keys of v have other chunks than those of k, or if the chunks
        of the heads do not fit; the message has the call that corrects it.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        expect_known(name, x)
    batch = tuple(_batch_chunks((q, k, v), axis, len(sizes.batch)) for axis in range(len(sizes.batch)))
    groups = sizes.heads // sizes.kv_heads
    if sizes.kv_heads > 1:
        wanted = tuple(n * groups for n in k.chunks[-3])
        _expect("q", q, {-3: wanted}, f"{groups} query heads for each head of k, as k.chunks[-3] is {k.chunks[-3]}")
    _expect("v", v, {-3: k.chunks[-3], -2: k.chunks[-2]}, "the chunks of k")
    return Grid(batch, q.chunks[-3], k.chunks[-3], q.chunks[-2], k.chunks[-2])


def expect_fit(name: str, x: Array, grid: Grid) -> None:
    """Require that an array has the chunks of a grid."""
    _expect(name, x, dict(zip(range(-x.ndim, 0), grid.chunks(name, x.shape), strict=True)), "the chunks of q and k")


def _batch_chunks(arrays: Sequence[Array], axis: int, count: int) -> tuple[int, ...]:
    """Return the chunks of a batch axis: those of the first array that has it."""
    for x in arrays:
        own = axis - count + x.ndim - 3
        if own >= 0 and x.shape[own] != 1:
            return x.chunks[own]  # type: ignore[no-any-return]  # an array is Any
    return (1,)


def expect_known(name: str, x: Array) -> None:
    """Require chunks of known sizes, none of them empty."""
    if any(map(math.isnan, itertools.chain(*x.chunks))):
        raise ShapeError(
            f"{name}: expected chunks of known sizes, got {tuple(x.shape)}; call {name}.compute_chunk_sizes() first"
        )
    for axis, chunks in enumerate(x.chunks):
        if 0 in chunks and sum(chunks):
            raise ShapeError(
                f"{name}: expected no empty chunk, got chunks {chunks} on axis {axis - x.ndim}; "
                f"drop it with {name}.rechunk({{{axis - x.ndim}: {tuple(n for n in chunks if n)}}})"
            )


def _expect(name: str, x: Array, chunks: Mapping[int, tuple[int, ...]], meaning: str) -> None:
    """Require chunks of some axes, with the call that makes them in the message."""
    differing = {axis: wanted for axis, wanted in chunks.items() if x.chunks[axis] != wanted}
    if differing:
        found = {axis: x.chunks[axis] for axis in differing}
        raise ShapeError(f"{name}: expected {meaning}, got chunks {found}; use {name}.rechunk({differing})")
