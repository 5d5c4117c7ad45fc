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
    """Return the number of cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # only Linux has it
        return os.cpu_count() or 1


@contextmanager
def announced(threads: int) -> Iterator[str]:
    """Set the environment variables that libraries read when they start; yield a description of JAX's threads.

    XLA reads NPROC once, when JAX first creates its devices. POLYATTN_NUM_THREADS is unset, so that polyattn's NumPy
    kernels use the number of threads of the BLAS.
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
    """Set the number of threads of the BLAS and OpenMP, and of torch if ``torch``; restore them at the end."""
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
