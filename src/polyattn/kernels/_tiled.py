"""The generic kernel: linear memory, on every backend. Forward and backward hold the scores of one tile at a time.

A tile of queries and keys is an attention problem that the plain kernel computes.
The sums over the tiles of keys are merged relative to the largest score (Rabe
and Staats, "Self-attention does not need O(n²) memory", 2021; Dao et al.,
"FlashAttention", 2022). The backward computes the weights of each tile again
from the statistics of the whole row.

Tiles that static arguments exclude are skipped, and tiles in which they exclude
no pair are computed without a mask. The loop is the backend's ``scan``, so that
the size of a traced program does not depend on the length of the sequence: all
tiles of one loop have the same shape, and their starts may be traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ._arrays import Array, cast, wide, widen
from ._masks import allowed, shifted
from ._merge import Sums, finished, merge_sums
from ._plain import PlainKernel, Rows, backward_in_units, forward_in_units, plain_gradients, plain_rows, sums
from ._problem import AttentionGrads, Kernel, Problem, RowStatistics
from ._structure import StructuredBias, StructuredMask
from ._units import LARGE, Units, divided, magnitude

PLAIN = PlainKernel()
SCORES = 2**20  # of a tile, over all heads: 4 MiB in float32; a few such arrays exist at one time
LEAST, MOST = 128, 1024


class Tile(NamedTuple):
    """The first query and the first key of a tile: integers, or 0-d arrays in a traced loop."""

    query: int | Array
    key: int | Array


class Loop(NamedTuple):
    """Tiles of one shape. ``whole``: static arguments exclude no pair of any of the tiles."""

    n_q: int
    n_k: int
    whole: bool
    tiles: tuple[Tile, ...]


class TiledKernel:
    """Attention tile by tile: the sums of the plain kernel over each tile, merged over the keys.

    Parameters
    ----------
    tile : (queries, keys), optional
        The most of a tile, the keys a multiple of 4, since dropout draws the bits of four keys together. By default
        they are chosen from the sizes of the problem.
    """

    name = "tiled"

    def __init__(self, tile: tuple[int, int] | None = None) -> None:
        if tile is not None and (min(tile) < 1 or tile[1] % 4):
            raise ArgumentError(f"tile: expected (queries, keys) of 1 or more, the keys a multiple of 4, got {tile}")
        self.tile = tile

    def supports(self, problem: Problem) -> str | None:
        """Support everything."""
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Return out and the row statistics: the sums of the tiles and the sinks, merged."""
        problem = in_tiles_of(self, problem)
        if in_one_tile(problem):
            return PLAIN.forward(q, k, v, problem)
        return forward_in_units(problem, q, k, v, tiled_forward)

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Return the sum of the gradients of the tiles, each computed with the statistics of the whole rows."""
        problem = in_tiles_of(self, problem)
        if in_one_tile(problem):
            return PLAIN.backward(dout, dlse, q, k, v, out, statistics, problem)
        return backward_in_units(problem, dout, dlse, q, k, v, out, statistics, tiled_rows, tiled_gradients)


def in_tiles_of(kernel: Kernel, problem: Problem) -> Problem:
    """Return the problem with the tile that a kernel was given, if it is a generic kernel that was given one."""
    tile = getattr(kernel, "tile", None)
    return problem if tile is None else replace(problem, tile=tile)


def in_one_tile(problem: Problem) -> bool:
    """Return whether all scores fit into one tile."""
    return tile_lengths(problem) == (problem.sizes.n_q, problem.sizes.n_k)


def tiled_forward(
    q: Array, k: Array, v: Array, problem: Problem, units: Units | None
) -> tuple[Array, RowStatistics]:  # fmt: skip
    """Return out, in at least float32, and the row statistics."""
    return finished(problem.xp, tiled_sums(q, k, v, problem, units), units)


def tiled_sums(q: Array, k: Array, v: Array, problem: Problem, units: Units | None) -> Sums:
    """Return Σ exp(score) v and Σ exp(score) of each row over its keys and the sink, divided by exp(largest)."""

    def sums_of(q_t: Array, k_t: Array, v_t: Array, tile: Tile, part: Problem) -> Sums:
        return sums(q_t, k_t, v_t, part, units=units_at(part, units, tile))

    return joined_tiles(q, k, v, problem, units, problem.sizes.d_v, sums_of)


def with_statistics(kernel: Kernel, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return out of a kernel, and row statistics without loss of digits."""
    out, statistics = kernel.forward(q, k, v, problem)
    return out, unrounded(kernel, q, k, statistics, problem)


def unrounded(kernel: Kernel, q: Array, k: Array, statistics: RowStatistics, problem: Problem) -> RowStatistics:
    """Return the row statistics, computed again if a kernel returned a rounded log-sum-exp and scores are large."""
    if not getattr(kernel, "joins_statistics", False):
        return statistics
    xp = problem.xp

    def again() -> RowStatistics:
        of_one = replace(problem, sizes=problem.sizes._replace(d_v=1))
        return finished(xp, tiled_sums(q, k, k[..., :1], of_one, None))[1]

    small = xp.less_equal(magnitude(xp, statistics.largest), LARGE() / 2)
    return problem.backend.cond(small, lambda: statistics, again)  # type: ignore[no-any-return]  # a backend is Any here


def tiled_rows(dout: Array, q: Array, k: Array, v: Array, problem: Problem, units: Units | None) -> Sums:
    """Return Σ exp(score) · dweight and Σ exp(score) of each row over its keys, divided by exp(largest)."""

    def rows_of(q_t: Array, k_t: Array, v_t: Array, tile: Tile, part: Problem) -> Sums:
        dout_t = cut(part, dout, tile.query, part.sizes.n_q, -2)
        return plain_rows(dout_t, q_t, k_t, v_t, part, units_at(part, units, tile))

    return joined_tiles(q, k, v, problem, units, 1, rows_of)


def joined_tiles(
    q: Array, k: Array, v: Array, problem: Problem, units: Units | None, features: int,
    of_tile: Callable[[Array, Array, Array, Tile, Problem], Sums],
) -> Sums:  # fmt: skip
    """Return the sums of all rows, merged over the sink and the tiles of keys."""
    sizes, xp = problem.sizes, problem.xp
    dtype, device, rows = wide(xp, q.dtype), problem.native_device, sizes.scores[:-1]
    zero = xp.zeros((*rows, 1), dtype=dtype, device=device)
    start = Sums(xp.zeros((*rows, features), dtype=dtype, device=device), zero, xp.zeros_like(zero))
    if problem.sinks is not None:
        sinks = zero + divided(cast(xp, problem.sinks, dtype)[:, None, None], units)  # (…, H, n_q, 1)
        start = start._replace(total=xp.where(xp.equal(sinks, -math.inf), zero, zero + 1), largest=sinks)

    def body(carry: Any, tile: Tile, part: Problem) -> Any:
        n_q, n_k = part.sizes.n_q, part.sizes.n_k
        q_t = widen(xp, cut(part, q, tile.query, n_q, -2))
        k_t, v_t = (widen(xp, cut(part, x, tile.key, n_k, -2)) for x in (k, v))
        before = Sums(*(cut(part, x, tile.query, n_q, -2) for x in carry))
        now = merge_sums(xp, before, of_tile(q_t, k_t, v_t, tile, part), units_at(part, units, tile))
        put = problem.backend.update_slice
        return tuple(put(x, x_t, tile.query, x.ndim - 2) for x, x_t in zip(carry, now, strict=True))

    return Sums(*over_tiles(problem, body, tuple(start)))


def tiled_gradients(
    dout: Array, q: Array, k: Array, v: Array, rows: Rows, problem: Problem
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of q, k, v and the bias, in at least float32."""
    xp, bias = problem.xp, problem.bias_array
    totals = tuple(None if x is None else xp.zeros_like(x, dtype=wide(xp, x.dtype)) for x in (q, k, v, bias))

    def body(carry: Any, tile: Tile, part: Problem) -> Any:
        dq, dk, dv, dbias = carry
        n_q, n_k = part.sizes.n_q, part.sizes.n_k
        q_t = widen(xp, cut(part, q, tile.query, n_q, -2))
        k_t, v_t = (widen(xp, cut(part, x, tile.key, n_k, -2)) for x in (k, v))
        dout_t, rows_t = cut(part, dout, tile.query, n_q, -2), rows_at(part, rows, tile)
        grads = plain_gradients(dout_t, q_t, k_t, v_t, rows_t, part)
        dq = add_at(part, dq, grads[0], (tile.query, None))
        dk, dv = (add_at(part, dx, grad, (tile.key, None)) for dx, grad in ((dk, grads[1]), (dv, grads[2])))
        if dbias is not None:
            where = (tile.query, tile.key) if problem.table is None else (None, None)
            dbias = add_at(part, dbias, cast(xp, grads[3], dbias.dtype), where)  # a float32 total of a float16 bias
        return dq, dk, dv, dbias

    dq, dk, dv, dbias = over_tiles(problem, body, totals)
    return dq, dk, dv, dbias


def rows_at(part: Problem, rows: Rows, tile: Tile) -> Rows:
    """Slice the rows of a tile from the statistics of all rows."""
    largest, log_total, shift = (cut(part, x, tile.query, part.sizes.n_q, -1) for x in rows[:3])
    return Rows(largest, log_total, shift, units_at(part, rows.units, tile))


def units_at(part: Problem, units: Units | None, tile: Tile) -> Units | None:
    """Slice the rows of a tile from the units of all rows."""
    return None if units is None else Units(*(cut(part, x, tile.query, part.sizes.n_q, -2) for x in units))


def tile_lengths(problem: Problem) -> tuple[int, int]:
    """Return the numbers of queries and keys of a tile: those of the problem, or equal if possible; at most all."""
    sizes = problem.sizes
    if problem.tile is not None:
        return min(sizes.n_q, problem.tile[0]), min(sizes.n_k, problem.tile[1])
    room = SCORES // max(math.prod(sizes.scores[:-2]), 1)
    side = next((n for n in range(MOST, LEAST, -64) if n * n <= room), LEAST)  # torch.compile cannot trace isqrt
    n_q = min(sizes.n_q, side)
    n_k = min(sizes.n_k, max(side, room // n_q // 64 * 64))
    return n_q, n_k


def over_tiles(problem: Problem, body: Callable[[Any, Tile, Problem], Any], carry: Any) -> Any:
    """Run ``carry = body(carry, tile, problem of the tile)`` for each tile that may have an allowed pair."""
    for loop in loops(problem):

        def step(carry: Any, index: Any, loop: Loop = loop) -> tuple[Any, tuple[()]]:
            tile = tile_at(problem, loop.tiles, index)
            return body(carry, tile, part_of(problem, tile, loop)), ()

        carry, _ = problem.backend.scan(step, carry, len(loop.tiles))
    return carry


def tile_at(problem: Problem, tiles: tuple[Tile, ...], index: int | Array) -> Tile:
    """Return a tile of a loop: of integers for an integer index, of 0-d arrays for a traced index."""
    if isinstance(index, int):
        return tiles[index]
    xp = problem.xp
    columns = (xp.asarray(starts, dtype=xp.int32, device=problem.native_device) for starts in zip(*tiles, strict=True))
    return Tile(*(xp.take(column, xp.reshape(index, (1,)))[0] for column in columns))


def loops(problem: Problem) -> Iterator[Loop]:
    """Yield loops over the tiles of a problem: one for each shape, whole or not. Fully excluded tiles are skipped."""
    sizes = problem.sizes
    step_q, step_k = tile_lengths(problem)
    if isinstance(problem.mask, StructuredMask):
        step_q, step_k = problem.mask.tile_lengths(step_q, step_k)
    for n_q, queries in _spans(sizes.n_q, step_q):
        for n_k, keys in _spans(sizes.n_k, step_k):
            kinds: dict[bool, list[Tile]] = {True: [], False: []}
            for i in queries:
                for j in keys:
                    some, all_ = reach(problem, i, i + n_q - 1, j, j + n_k - 1)
                    if some:
                        kinds[all_].append(Tile(i, j))
            for whole, tiles in kinds.items():
                if tiles:
                    yield Loop(n_q, n_k, whole, tuple(tiles))


def _spans(n: int, step: int) -> list[tuple[int, Sequence[int]]]:
    """Return (length, starts) of the full tiles, and of the shorter last tile if there is a remainder."""
    if n <= step:  # not ``range``, for which torch.compile would specialise n
        return [(n, (0,))]
    full = n // step * step
    return [(step, range(0, full, step)), *([(n - full, (full,))] if full < n else [])]


def reach(problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
    """Return whether a tile may have an allowed pair, and whether all its pairs are allowed, from static values.

    If causality, window or lengths depend on an array, the first may be True without an allowed pair, and the second
    is False.
    """
    some, everything = _reach_of_positions(problem, i, i_last, j, j_last)
    if not (some and isinstance(problem.mask, StructuredMask)):
        return some, everything
    some, everything_there = problem.mask.reach(problem, i, i_last, j, j_last)
    return some, everything and everything_there


def _reach_of_positions(problem: Problem, i: int, i_last: int, j: int, j_last: int) -> tuple[bool, bool]:
    left, right = problem.reach
    some = everything = True
    if left is not None or right is not None:
        offset = problem.q_offset
        if not isinstance(offset, int):
            return True, False
        if right is not None:
            some, everything = j <= offset + i_last + right, j_last <= offset + i + right
        if left is not None:
            some, everything = some and j_last >= offset + i - left, everything and j >= offset + i_last - left
    lengths = problem.key_lengths
    if lengths is None:
        return some, everything
    if not isinstance(lengths, int):
        return some, False
    return some and j < lengths, everything and j_last < lengths


def part_of(problem: Problem, tile: Tile, loop: Loop) -> Problem:
    """Return the problem of one tile, with positions relative to the start of the tile."""
    i, j = tile
    first_query, first_key = problem.origin
    part = replace(
        problem,
        sizes=problem.sizes._replace(n_q=loop.n_q, n_k=loop.n_k),
        mask=_pairs(problem, problem.mask, tile, loop),
        bias=_pairs(problem, problem.bias, tile, loop),
        q_segments=_cut_unless_broadcast(problem, problem.q_segments, i, loop.n_q, -1),
        k_segments=_cut_unless_broadcast(problem, problem.k_segments, j, loop.n_k, -1),
        sinks=None,
        origin=(shifted(problem, first_query, plus=i, minus=0), shifted(problem, first_key, plus=j, minus=0)),
        phase=first_key % 4 if isinstance(first_key, int) else problem.phase,  # a tile starts at a multiple of 4
        rows=problem.rows or problem.sizes.n_q,
        q_offset=shifted(problem, problem.q_offset, plus=i, minus=j),
        table=None if problem.table is None else widen(problem.xp, problem.table),  # its gradient is a sum over tiles
    )
    if loop.whole:
        mask = None if isinstance(problem.mask, StructuredMask) else part.mask
        return replace(part, causal=False, window=(None, None), key_lengths=None, mask=mask)
    lengths = problem.key_lengths
    return replace(part, key_lengths=None if lengths is None else shifted(problem, lengths, plus=0, minus=j))


def allowed_in(problem: Problem, rows: slice, keys: slice) -> Array | None:
    """Return the allowed pairs among these rows and keys, as :func:`allowed` for the whole problem; None if all."""
    if (rows, keys) == (slice(0, problem.sizes.n_q), slice(0, problem.sizes.n_k)):
        return allowed(problem)
    loop = Loop(rows.stop - rows.start, keys.stop - keys.start, False, ())
    return allowed(part_of(problem, Tile(rows.start, keys.start), loop))


def cut(problem: Problem, x: Array, start: int | Array, length: int, axis: int) -> Array:
    """Return ``length`` entries of ``x`` from ``start``, along an axis with a negative number."""
    if isinstance(start, int):
        return x[(..., slice(start, start + length), *(slice(None),) * (-1 - axis))]
    xp = problem.xp
    count = xp.arange(length, dtype=xp.int32, device=problem.native_device)
    return xp.take(x, xp.add(count, start), axis=x.ndim + axis)


def add_at(problem: Problem, total: Array, x: Array, starts: tuple[int | Array | None, int | Array | None]) -> Array:
    """Return ``total`` with ``x`` added at ``starts`` of the last two axes; None and broadcast axes are whole."""
    xp, put = problem.xp, problem.backend.update_slice
    begins = {axis: s for axis, s in zip((-2, -1), starts, strict=True) if s is not None}
    begins = {axis: s for axis, s in begins.items() if x.ndim >= -axis and total.shape[axis] != 1}
    if not begins:
        return xp.add(total, x)
    if len(begins) == 2:  # a tile of a bias: update its rows, then write the rows into the total
        rows = cut(problem, total, begins[-2], x.shape[-2], -2)
        columns = xp.add(cut(problem, rows, begins[-1], x.shape[-1], -1), x)
        rows = put(xp.asarray(rows, copy=True), columns, begins[-1], rows.ndim - 1)
        return put(total, rows, begins[-2], total.ndim - 2)
    ((axis, start),) = begins.items()
    here = cut(problem, total, start, x.shape[axis], axis)
    return put(total, xp.add(here, x), start, total.ndim + axis)


def _pairs(problem: Problem, x: Array | None, tile: Tile, loop: Loop) -> Array | None:
    """Slice a mask or bias along its axes that do not broadcast; a structured one is unchanged, and uses ``origin``."""
    if isinstance(x, StructuredBias | StructuredMask):
        return x
    x = _cut_unless_broadcast(problem, x, tile.key, loop.n_k, -1)
    return _cut_unless_broadcast(problem, x, tile.query, loop.n_q, -2)


def _cut_unless_broadcast(
    problem: Problem, x: Array | None, start: int | Array, length: int, axis: int
) -> Array | None:
    if x is None or x.ndim < -axis or x.shape[axis] == 1:
        return x
    return cut(problem, x, start, length, axis)
