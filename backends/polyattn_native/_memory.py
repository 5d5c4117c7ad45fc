"""Memory of large results, which is kept for later results.

The C library returns large pieces of memory to the system when they are freed. The system clears each page when it is
used again, which takes several times as long as a pointwise operation; a training step would pay for every result.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from typing import Any

import numpy as np

from polyattn.backend import Array

__all__ = ["empty"]

LEAST = 2**18
"""Bytes of the smallest result whose memory is kept: the C library itself keeps that of smaller ones."""
MOST = 2**27
"""Bytes that are kept at most; beyond them, the oldest are freed."""
GRAIN = 2**16
LINE = 64
"""Bytes of a cache line, at which an array begins."""
Block = np.ndarray[Any, np.dtype[np.uint8]]


class _Memory:
    """Blocks that no array uses, the oldest first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a block may come back while one is taken, from the garbage collector
        self.free: list[Block] = []
        self.leases: dict[int, Any] = {}  # a weak reference to the memory of each block in use

    def take(self, size: int) -> ctypes.Array[ctypes.c_char]:
        """Return writable memory of that size. Its block comes back when nothing refers to the memory any more."""
        with self.lock:
            found = [i for i, block in enumerate(self.free) if block.size == size + LINE]
            block = self.free.pop(found[-1]) if found else None
        block = np.empty(size + LINE, np.uint8) if block is None else block
        # An array's base is what it was made of, if that is not an array or a memoryview itself.
        memory = (ctypes.c_char * size).from_buffer(block, -block.ctypes.data % LINE)  # type: ignore[arg-type]  # a buffer
        self.leases[id(block)] = weakref.ref(memory, lambda lease: self.give(block))
        return memory

    def give(self, block: Block) -> None:
        """Keep a block; free the oldest ones while there are too many."""
        with self.lock:
            del self.leases[id(block)]
            self.free.append(block)
            while sum(block.size for block in self.free) > MOST:
                del self.free[0]


_memory = _Memory()


def empty(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an array that is not initialised."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST:
        return np.empty(shape, dtype)
    memory: Any = _memory.take(-(-size // GRAIN) * GRAIN)
    return np.ndarray(shape, dtype, memory)
