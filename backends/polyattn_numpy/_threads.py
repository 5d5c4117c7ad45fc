"""A thread pool for tasks, in which each thread runs a single-threaded BLAS.

If the BLAS started threads inside our threads, there would be more threads than
cores. So the BLAS is limited to one thread while ours run. The limit belongs to the
process and calls may overlap, so one guard counts the calls that need it.
threadpoolctl's own limits are not restored correctly if they overlap, and a new
controller costs more time than a small problem; so the guard limits only NumPy's BLAS.
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
    """Return the number of threads to use: that of NumPy's BLAS, at most POLYATTN_NUM_THREADS.

    So a limit of threadpoolctl, or OPENBLAS_NUM_THREADS, applies here too.
    """
    allowed = _guard.threads()
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return allowed
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ArgumentError(f"{VARIABLE}: expected a number of threads, 1 or more, got {text!r}")
    return min(int(text), allowed)


def run(worker: Callable[[], Callable[[Any], None]], tasks: Iterable[Any], threads: int) -> None:
    """Run all tasks in this thread and up to ``threads − 1`` others, with the BLAS limited to one thread.

    Each thread calls ``worker()`` once, to allocate its buffers, and then the result for each of its tasks. After an
    exception in any thread no further task starts, and the exception is raised here when all threads have stopped.
    """
    queue = _Queue(worker, tasks)
    with _guard.held():
        others: list[Future[None]] = []
        with contextlib.suppress(RuntimeError):  # no thread can start, for instance at the exit of the interpreter
            others.extend(_executor().submit(queue.drain) for _ in range(threads - 1))
        queue.drain()
        while others:
            try:
                if not others[-1].cancel():  # the pool was busy: a worker that has not started has no task left
                    others[-1].result()
                others.pop()
            except KeyboardInterrupt as interrupt:  # go on waiting: the threads still use the arrays
                queue.failure = interrupt
    if queue.failure is not None:
        raise queue.failure


def blas_within_limit() -> contextlib.AbstractContextManager[None]:
    """Leave the number of BLAS threads as it is, or limit it to 1 if POLYATTN_NUM_THREADS is lower."""
    if not os.environ.get(VARIABLE):
        return contextlib.nullcontext()
    return contextlib.nullcontext() if thread_count() == _guard.threads() else _guard.held()


class _Queue:
    """Tasks that several threads take one by one, until a task raises an exception."""

    def __init__(self, worker: Callable[[], Callable[[Any], None]], tasks: Iterable[Any]) -> None:
        self.worker = worker
        self.tasks = iter(list(tasks))  # a list's iterator may be shared by threads
        self.failure: BaseException | None = None

    def drain(self) -> None:
        """Run tasks until the queue is empty. NumPy's floating-point settings are set for each thread."""
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
    """Limits NumPy's BLAS to one thread while any call needs that, and then restores the previous number."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.before = 1

    def threads(self) -> int:
        """Return the number of threads of the BLAS without our limit."""
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
        """Reset the guard in a child process: the threads that limited the BLAS exist only in the parent."""
        self.lock = threading.Lock()
        if self.holders:
            self.holders = 0
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


@functools.cache
def _executor() -> ThreadPoolExecutor:
    """Return the thread pool of this process; its threads start at first use."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="polyattn")


def _after_fork() -> None:
    _guard.after_fork()
    _executor.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
