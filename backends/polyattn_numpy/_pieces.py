"""Row-wise functions computed in pieces that fit the processor's caches, on several threads.

NumPy allocates an array for each line of a formula. A large array does not fit the caches, so the next line reads it
from main memory; a piece does fit. With much smaller pieces, the threads would wait for Python's global lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from polyattn.backend import Array

from ._threads import run, thread_count

__all__ = ["in_pieces"]

PIECE = 2**17  # elements of the largest array: 512 KiB in float32
WORTHWHILE = 2 * PIECE  # elements below which a second thread is slower


def in_pieces(function: Callable[..., Any], arrays: tuple[Array, ...], axes: int) -> Any:
    """Return ``function(*arrays)``, computed for a block of rows at a time.

    The blocks depend only on the shapes, so the results do not depend on the number of threads.
    """
    lead = arrays[0].shape[: arrays[0].ndim - axes]
    size = 0
    for x in arrays:
        size = max(size, x.size)
    if size < WORTHWHILE or not lead:
        return function(*arrays)
    if all(x.flags.c_contiguous for x in arrays):
        arrays = tuple(x.reshape(-1, *x.shape[len(lead) :]) for x in arrays)
    rows = arrays[0].shape[0]
    step = max(1, PIECE * rows // size)
    results: list[Array] = []
    first = threading.Lock()

    def piece(start: int) -> None:
        here = slice(start, start + step)
        made = function(*(x[here] for x in arrays))
        parts = made if isinstance(made, tuple) else (made,)
        with first:
            if not results:
                results.extend(np.empty((rows, *part.shape[1:]), dtype=part.dtype) for part in parts)
        for result, part in zip(results, parts, strict=True):
            result[here] = part

    run(lambda: piece, range(0, rows, step), thread_count())
    taken = arrays[0].ndim - axes
    whole = tuple(result.reshape(*lead, *result.shape[taken:]) for result in results)
    return whole if len(whole) > 1 else whole[0]
