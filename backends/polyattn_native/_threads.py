"""The number of threads for a call, and the limit of NumPy's BLAS while our threads run.

If the BLAS started threads inside our threads, there would be more threads than
cores. So the BLAS is limited to one thread while NumPy kernels run in ours. The limit
belongs to the process and calls may overlap, so one guard counts the calls that need it.
threadpoolctl's own limits are not restored correctly if they overlap, and a new
controller costs more time than a small problem; so the guard limits only NumPy's BLAS.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from polyattn.backend import ArgumentError

__all__ = ["VARIABLE", "blas_limited", "blas_threads", "thread_count"]

VARIABLE = "POLYATTN_NUM_THREADS"


def thread_count(backend: str) -> int:
    """Return the number of threads for arrays of a backend: that of its library, at most POLYATTN_NUM_THREADS.

    For torch's tensors the number is that of ``torch.set_num_threads``, for JAX's arrays that of XLA's pool, else that
    of NumPy's BLAS; so a limit of threadpoolctl, or OPENBLAS_NUM_THREADS, applies too.
    """
    if backend == "torch":
        allowed = int(sys.modules["torch"].get_num_threads())
    else:
        allowed = _xla_threads() if backend == "jax" else blas_threads()
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return allowed
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ArgumentError(f"{VARIABLE}: expected a number of threads, 1 or more, got {text!r}")
    return min(int(text), allowed)


def _xla_threads() -> int:
    """Return the number of threads that XLA gives its pool on the CPU."""
    text = os.environ.get("NPROC", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def blas_threads() -> int:
    """Return the number of threads of NumPy's BLAS without our limit."""
    return _guard.threads()


def blas_limited() -> contextlib.AbstractContextManager[None]:
    """Limit NumPy's BLAS to one thread."""
    return _guard.held()


class _Guard:
    """Limits NumPy's BLAS to one thread while any call needs that, and then restores the previous number."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: set[object] = set()
        self.before = 1

    def threads(self) -> int:
        """Return the number of threads of the BLAS without our limit."""
        with self.lock:
            return self.before if self.holders else _blas_threads()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        holder = object()
        try:
            with self.lock:
                first = not self.holders
                if first:
                    self.before = _blas_threads()
                self.holders.add(holder)
                if first:
                    _limit_blas(1)
            yield
        finally:
            try:
                self._release(holder)
            except BaseException:  # an interrupt, which may come between any two steps
                self._release(holder)
                raise

    def _release(self, holder: object) -> None:
        with self.lock:
            if self.holders == {holder}:
                _limit_blas(self.before)
            self.holders.discard(holder)

    def after_fork(self) -> None:
        """Reset the guard in a child process: the threads that limited the BLAS exist only in the parent."""
        self.lock = threading.Lock()
        if self.holders:
            self.holders = set()
            _limit_blas(self.before)


_guard = _Guard()  # one for the process, like the number of BLAS threads


@functools.cache
def _blas() -> Any:
    """Return threadpoolctl's controller of NumPy's BLAS, or None if threadpoolctl finds none."""
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    home = Path(np.__file__).resolve().parent  # wheels have their BLAS in numpy.libs or numpy/.dylibs
    own = [library for library in found if Path(library.filepath).resolve().is_relative_to(home)]
    beside = [library for library in found if Path(library.filepath).resolve().parent.name == "numpy.libs"]
    return next(iter([*own, *beside, *found]), None)


def _blas_threads() -> int:
    blas = _blas()
    return 1 if blas is None else int(blas.get_num_threads() or 1)


def _limit_blas(threads: int) -> None:
    blas = _blas()
    if blas is not None:
        blas.set_num_threads(threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_guard.after_fork)
