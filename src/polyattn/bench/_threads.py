"""The same number of threads for every library of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

__all__ = ["announced", "cores", "limited"]

XLA, OURS = "NPROC", "POLYATTN_NUM_THREADS"


def cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


@contextmanager
def announced(threads: int) -> Iterator[str]:
    """Set the variables that libraries read when they start; yield what that comes to for JAX, in words.

    XLA reads NPROC once, when JAX first asks for its devices. polyattn's own variable is taken away: its NumPy kernels
    then follow the BLAS.
    """
    before = {name: os.environ.pop(name, None) for name in (XLA, OURS)}
    os.environ[XLA] = str(threads)
    try:
        yield "as it was started" if "jax" in sys.modules else f"{threads}, by NPROC"
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def limited(threads: int, *, torch: bool) -> Iterator[None]:
    """Hold the BLAS and OpenMP, and torch where it takes part, to a number of threads; restore what they had."""
    if not torch:
        with threadpool_limits(threads):
            yield
        return
    import torch as library

    before = library.get_num_threads()
    with threadpool_limits(threads):
        library.set_num_threads(threads)
        try:
            yield
        finally:
            library.set_num_threads(before)
