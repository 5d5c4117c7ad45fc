"""Work for several threads, each with NumPy's BLAS to itself.

A BLAS that starts threads of its own inside ours would wait for cores that they
hold. So it is held to one thread while ours run: by one counted guard, since its
limit belongs to the whole process, and calls may overlap. threadpoolctl's own
limits may not overlap without staying stuck, and a fresh controller costs more
than a small problem; so the guard knows NumPy's own BLAS, and that alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from polyattn.backend import ArgumentError

__all__ = ["blas_within_limit", "run", "thread_count"]

VARIABLE = "POLYATTN_NUM_THREADS"


def thread_count() -> int:
    """Return how many threads may work: as many as NumPy's BLAS may, and no more than POLYATTN_NUM_THREADS.

    So a limit of threadpoolctl's, or OPENBLAS_NUM_THREADS, counts for us as well.
    """
    allowed = _guard.threads()
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return allowed
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ArgumentError(f"{VARIABLE}: expected a number of threads, 1 or more, got {text!r}")
    return min(int(text), allowed)


def run(worker: Callable[[], Callable[[Any], None]], tasks: Iterable[Any], threads: int) -> None:
    """Do every task, in this thread and in up to ``threads − 1`` others, with the BLAS held to one thread.

    Each thread calls ``worker()`` once, for buffers of its own, and the result on its tasks. What is raised in any
    of them is raised here, once none works on this call any more; tasks not begun by then are dropped.
    """
    queue = _Queue(worker, tasks)
    with _guard.held():
        others: list[Future[None]] = []
        with contextlib.suppress(RuntimeError):  # no thread can be started, at the interpreter's exit for instance
            others.extend(_executor().submit(queue.drain) for _ in range(threads - 1))
        queue.drain()
        while others:
            try:
                if not others[-1].cancel():  # one that has not begun would find nothing to do: the pool was busy
                    others[-1].result()
                others.pop()
            except KeyboardInterrupt as interrupt:  # wait all the same: the arrays are in use until then
                queue.failure = interrupt
    if queue.failure is not None:
        raise queue.failure


def blas_within_limit() -> contextlib.AbstractContextManager[None]:
    """Let the BLAS use its own threads, unless POLYATTN_NUM_THREADS allows fewer: then one."""
    if not os.environ.get(VARIABLE):
        return contextlib.nullcontext()
    return contextlib.nullcontext() if thread_count() == _guard.threads() else _guard.held()


class _Queue:
    """Tasks that several threads take one by one, until one of them fails."""

    def __init__(self, worker: Callable[[], Callable[[Any], None]], tasks: Iterable[Any]) -> None:
        self.worker = worker
        self.tasks = iter(list(tasks))  # a list's iterator may be shared by threads
        self.failure: BaseException | None = None

    def drain(self) -> None:
        """Work until nothing is left. Floating-point settings are each thread's own."""
        try:
            with np.errstate(all="ignore"):
                work = self.worker()
                for task in self.tasks:
                    if self.failure is not None:
                        return
                    work(task)
        except BaseException as error:
            self.failure = self.failure or error


class _Guard:
    """Holds NumPy's BLAS to one thread while anyone wants it so, and then restores what it had."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.before = 1

    def threads(self) -> int:
        """Return how many threads the BLAS has when nobody holds it."""
        with self.lock:
            return self.before if self.holders else _blas_threads()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        with self.lock:
            if self.holders == 0:
                self.before = _blas_threads()
                _limit_blas(1)
            self.holders += 1
        try:
            yield
        finally:
            with self.lock:
                self.holders -= 1
                if self.holders == 0:
                    _limit_blas(self.before)

    def after_fork(self) -> None:
        """Start anew in a child: whoever held the BLAS did not come along."""
        self.lock = threading.Lock()
        if self.holders:
            self.holders = 0
            _limit_blas(self.before)


_guard = _Guard()  # of the process, as the BLAS's own setting is


@functools.cache
def _blas() -> Any:
    """Return threadpoolctl's handle of the BLAS that NumPy brings or links, None where it knows none."""
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    home = Path(np.__file__).resolve().parent  # wheels keep theirs in numpy.libs, numpy/.dylibs
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


@functools.cache
def _executor() -> ThreadPoolExecutor:
    """Return the threads of this process; they start when first needed."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="polyattn")


def _after_fork() -> None:
    _guard.after_fork()
    _executor.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
