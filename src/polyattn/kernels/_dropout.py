"""The dropout mask: a pure function of (seed, position), the same bits on every library and for every tiling.

Threefry-2x32 with 13 rounds (Salmon, Moraes, Dror and Shaw, "Parallel random
numbers: as easy as 1, 2, 3", SC 2011), in int32, because not every library can
compute with uint32. The key is the seed's low and high half; the counter is
(flattened batch·head·query row, key // 4). The two words of a counter are four
16-bit lanes, low half before high half, one for each of four adjacent keys. A
weight is kept iff its lane ≥ round(65536·p).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ._arrays import Array, cast, dtype_name
from ._problem import Problem


class Threefry(NamedTuple):
    """The constants of Threefry-2x32: the rotation of each round, the parity of the key, the number of rounds."""

    rotations: tuple[int, ...]
    parity: int
    rounds: int


THREEFRY = Threefry((13, 15, 26, 6, 17, 29, 16, 24), 0x1BD11BDA, 13)


def keep_mask(problem: Problem) -> Array:
    """Return True for each weight that dropout keeps, boolean ``(…, H, n_q, n_k)``."""
    xp, sizes, device = problem.xp, problem.sizes, problem.native_device
    rows, heads = math.prod(sizes.scores[:-1]), math.prod(sizes.scores[:-2])
    head = xp.arange(heads, dtype=xp.int32, device=device) if problem.numbers is None else problem.numbers
    head = head[:, None] * (problem.rows or sizes.n_q)
    row = xp.add(head, _count(problem, sizes.n_q, problem.origin[0])[None, :])  # (batch·H, n_q)
    row = xp.reshape(row, (rows, 1))
    key = problem.origin[1]
    before = key % 4 if isinstance(key, int) else problem.phase  # keys of the first block that are before the tile
    first = key // 4 if isinstance(key, int) else xp.bitwise_right_shift(key, xp.full_like(key, 2))
    block = _count(problem, -(-(before + sizes.n_k) // 4), first)[None, :]  # (1, blocks)
    words = threefry(xp, *_key(problem), *xp.broadcast_arrays(row, block))
    lanes = [half for word in words for half in (word & 0xFFFF, (word >> 16) & 0xFFFF)]
    lane = xp.reshape(xp.stack(lanes, axis=-1), (rows, -1))[:, before : before + sizes.n_k]  # (rows, n_k)
    return xp.reshape(xp.greater_equal(lane, round(65536 * problem.dropout)), sizes.scores)


def threefry(
    xp: Any, key0: Array, key1: Array, x0: Array, x1: Array, rounds: int = THREEFRY.rounds
) -> tuple[Array, Array]:
    """Return the two words of Threefry-2x32 at the counter ``(x0, x1)``, all int32."""
    keys = (key0, key1, xp.bitwise_xor(xp.bitwise_xor(key0, key1), xp.full_like(key0, THREEFRY.parity)))
    x0, x1 = xp.add(x0, keys[0]), xp.add(x1, keys[1])
    for i in range(rounds):
        turn = THREEFRY.rotations[i % 8]
        x0 = xp.add(x0, x1)
        left = xp.bitwise_left_shift(x1, xp.full_like(x1, turn))
        right = xp.bitwise_right_shift(x1, xp.full_like(x1, 32 - turn))
        right = xp.bitwise_and(right, xp.full_like(x1, (1 << turn) - 1))  # logical shift: clear the sign bits
        x1 = xp.bitwise_xor(xp.bitwise_or(left, right), x0)
        if i % 4 == 3:
            step = i // 4 + 1
            x0 = xp.add(x0, keys[step % 3])
            x1 = xp.add(x1, xp.add(keys[(step + 1) % 3], xp.full_like(key0, step)))
    return x0, x1


def _count(problem: Problem, length: int, start: int | Array) -> Array:
    """Return start, start + 1, …, start + length − 1."""
    xp: Any = problem.xp
    count = xp.arange(length, dtype=xp.int32, device=problem.native_device)
    return count + start if isinstance(start, int) else xp.add(count, start)


def _key(problem: Problem) -> tuple[Array, Array]:
    """Return the seed's low and high 32 bits as int32 arrays that broadcast against ``(rows, blocks)``."""
    xp, seed = problem.xp, problem.seed
    if isinstance(seed, int):
        halves = ((seed >> shift) & 0xFFFFFFFF for shift in (0, 32))
        signed = (half - (1 << 32) if half >= 1 << 31 else half for half in halves)
        low, high = (xp.asarray([[half]], dtype=xp.int32, device=problem.native_device) for half in signed)
        return low, high
    seed, name = xp.reshape(seed, (1, 1)), dtype_name(seed.dtype)
    if name in ("int64", "uint64"):
        seed = cast(xp, seed, xp.int64)  # keeps the bits; torch cannot shift uint64
        mask = xp.full_like(seed, 0xFFFFFFFF)
        halves_ = (xp.bitwise_and(xp.bitwise_right_shift(seed, xp.full_like(seed, s)), mask) for s in (0, 32))
        low, high = (xp.astype(xp.where(h >= 2**31, h - 2**32, h), xp.int32) for h in halves_)
        return low, high
    seed = cast(xp, seed, xp.int32)
    if name == "uint32":
        return seed, xp.zeros_like(seed)
    return seed, xp.bitwise_right_shift(seed, xp.full_like(seed, 31))  # sign extension, as for a 64-bit seed
