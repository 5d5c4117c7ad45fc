"""The dropout mask of a tile: Threefry-2x32 with 13 rounds, in place and in uint32.

The bits are equal to those of :func:`polyattn.attention` on every backend (Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = low and high half of the seed, counter =
(flattened batch·head·query row, key // 4), four 16-bit lanes per block, kept iff lane ≥ round(65536·p).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from polyattn.backend import THREEFRY, Array

__all__ = ["keep_mask"]

MASK = 0xFFFFFFFF


def keep_mask(
    rows: Array, start: int, stop: int, seed: int, dropout: float, take: Callable[[str, tuple[int, ...], Any], Array]
) -> Array:
    """Return which keys of ``[start, stop)`` each row keeps, boolean ``(rows, keys)``; 0 < dropout < 1.

    ``take(name, shape, dtype)`` returns a buffer.
    """
    first, last = start // 4, -(-stop // 4)
    shape = (rows.size, last - first)
    x0, x1, spare = (take(name, shape, np.uint32) for name in ("x0", "x1", "spare"))
    x0[...] = rows.reshape(-1, 1)
    x1[...] = np.arange(first, last, dtype=np.uint32)
    threefry(seed & MASK, seed >> 32 & MASK, x0, x1, spare)
    words = take("words", (*shape, 2), np.dtype("<u4"))  # lanes in order: the low half of a word before the high one
    words[..., 0], words[..., 1] = x0, x1
    lanes = words.view("<u2").reshape(rows.size, -1)[:, start - 4 * first : stop - 4 * first]
    return np.greater_equal(lanes, round(65536 * dropout), out=take("keep", lanes.shape, np.bool_))


def threefry(key0: int, key1: int, x0: Array, x1: Array, spare: Array) -> None:
    """Replace the counters ``x0`` and ``x1`` by the two words of Threefry-2x32."""
    keys = tuple(np.uint32(key) for key in (key0, key1, key0 ^ key1 ^ THREEFRY.parity))
    x0 += keys[0]
    x1 += keys[1]
    for i in range(THREEFRY.rounds):
        turn = np.uint32(THREEFRY.rotations[i % 8])
        x0 += x1
        np.left_shift(x1, turn, out=spare)
        np.right_shift(x1, np.uint32(32) - turn, out=x1)
        x1 |= spare
        x1 ^= x0
        if i % 4 == 3:
            step = i // 4 + 1
            x0 += keys[step % 3]
            x1 += np.uint32((int(keys[(step + 1) % 3]) + step) & MASK)
