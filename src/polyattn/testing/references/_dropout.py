"""The dropout mask, by Threefry-2x32 with 13 rounds (Salmon et al. 2011), in Python integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD = 0xFFFFFFFF
_PARITY = 0x1BD11BDA
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


def threefry2x32(key: tuple[int, int], counter: tuple[int, int], rounds: int = 13) -> tuple[int, int]:
    """Return the two 32-bit words of the block ``counter`` under ``key``."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = (counter[0] + keys[0]) & _WORD, (counter[1] + keys[1]) & _WORD
    for turn in range(rounds):
        rotation = _ROTATIONS[turn % 8]
        x0 = (x0 + x1) & _WORD
        x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) & _WORD
        x1 ^= x0
        if turn % 4 == 3:
            injection = turn // 4 + 1
            x0 = (x0 + keys[injection % 3]) & _WORD
            x1 = (x1 + keys[(injection + 1) % 3] + injection) & _WORD
    return x0, x1


def keep_mask(shape: tuple[int, ...], p: float, seed: int) -> NDArray[np.bool_]:
    """Return the keep-mask of ``shape`` (…, H, n_q, n_k) for dropout ``p``.

    The block for a row (batch, head and query flattened) and four keys has the
    counter (row, key // 4); its four 16-bit lanes are, in the order of the keys,
    the low and high halves of its first word, then those of its second.
    """
    key = (seed & _WORD, (seed >> 32) & _WORD)
    keep = np.zeros((int(np.prod(shape[:-1])), shape[-1]), dtype=bool)
    for row, column in np.ndindex(keep.shape):
        words = threefry2x32(key, (row, column // 4))
        lane = (words[column % 4 // 2] >> (16 * (column % 2))) & 0xFFFF
        keep[row, column] = lane >= round(65536 * p)
    return keep.reshape(shape)
