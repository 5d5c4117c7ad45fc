"""Conversion to chunks, and computing on the scheduler that there is."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import dask
import dask.array as da
import numpy as np

from ...errors import EngineError
from ...kernels import Array

__all__ = ["chunked", "computed", "keep"]

POSITIONS = 2048
"""The number of positions in a chunk of an array that came without chunks."""


def chunked(x: Any, copy: bool | None = None) -> Array:
    """Return a Dask array: itself, or a NumPy array in chunks of ``POSITIONS`` along the last axis but one."""
    if isinstance(x, da.Array):
        return x.copy() if copy else x
    if copy is False:
        raise ValueError("an array is copied into chunks")
    chunks = tuple(POSITIONS if axis == -2 else -1 for axis in range(-x.ndim, 0))
    return da.from_array(np.array(x, copy=True), chunks=chunks)


def computed(x: Array) -> np.ndarray[Any, Any]:
    """Return the values of an array on the host."""
    with scheduler():
        return np.asarray(x.compute())


def keep(arrays: Sequence[Array]) -> None:
    """Compute arrays together, and keep their chunks in their graphs, so that no task of them runs again."""
    lazy = [x for x in arrays if isinstance(x, da.Array)]
    if lazy:
        with scheduler():
            done = dask.persist(*lazy)
        for x, kept in zip(lazy, done, strict=True):
            x.dask = kept.dask


@contextmanager
def scheduler() -> Iterator[None]:
    """Compute on the current client of distributed, else on threads of this process, without warnings of NumPy.

    Raises
    ------
    EngineError
        If the client has lost its scheduler.
    """
    client = current_client()
    if client is not None:
        expect_running(client)
    own = client is None and not any(dask.config.get(setting, None) for setting in ("scheduler", "pool"))
    with dask.config.set(pool=threads()) if own else nullcontext(), np.errstate(all="ignore"):
        yield


def expect_running(client: Any) -> None:
    """Require that a client has its scheduler."""
    if client.status != "running":
        raise EngineError(
            f"the scheduler of the current distributed.Client is gone (the client is {client.status}); close the "
            "client to compute in this process, or connect a new one"
        )


def current_client() -> Any:
    """Return the current client of distributed, or None."""
    if "distributed" not in sys.modules:  # a program without it has no client
        return None
    from distributed import get_client

    try:
        return get_client()
    except ValueError:
        return None


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Return threads in which inf and NaN are results without a warning."""
    silent = functools.partial(np.seterr, all="ignore")
    return ThreadPoolExecutor(dask.system.CPU_COUNT, thread_name_prefix="polyattn-dask", initializer=silent)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=threads.cache_clear)
