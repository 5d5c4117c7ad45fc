"""A thread pool for tasks, in which each thread runs a single-threaded BLAS."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from polyattn_native import _threads

__all__ = ["blas_within_limit", "run", "thread_count"]


def thread_count() -> int:
    """Return the number of threads to use: that of NumPy's BLAS, at most POLYATTN_NUM_THREADS."""
    return _threads.thread_count("numpy")


def run(worker: Callable[[], Callable[[Any], None]], tasks: Iterable[Any], threads: int) -> None:
    """Run all tasks in this thread and up to ``threads − 1`` others, with the BLAS limited to one thread.

    Each thread calls ``worker()`` once, to allocate its buffers, and then the result for each of its tasks. After an
    exception in any thread no further task starts, and the exception is raised here when all threads have stopped.
    """
    queue = _Queue(worker, tasks)
    with _threads.blas_limited():
        others: list[Future[None]] = []
        try:
            with contextlib.suppress(RuntimeError):  # no thread can start, for instance at the exit of the interpreter
                others.extend(_executor().submit(queue.drain) for _ in range(threads - 1))
            queue.drain()
            _wait(others)
        except BaseException as interrupt:  # go on waiting: the threads still use the arrays
            queue.failure = interrupt
            _end_executor()
            _wait(others)
    if queue.failure is not None:
        raise queue.failure


def blas_within_limit() -> contextlib.AbstractContextManager[None]:
    """Leave the number of BLAS threads as it is, or limit it to 1 if POLYATTN_NUM_THREADS is lower."""
    if not os.environ.get(_threads.VARIABLE):
        return contextlib.nullcontext()
    return contextlib.nullcontext() if thread_count() == _threads.blas_threads() else _threads.blas_limited()


def _wait(others: list[Future[None]]) -> None:
    """Wait until the threads have stopped, also if the wait is interrupted."""
    interrupt = None
    while others:
        try:
            if not others[-1].cancel():  # the pool was busy: a worker that has not started has no task left
                others[-1].result()
            others.pop()
        except BaseException as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


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


@functools.cache
def _executor() -> ThreadPoolExecutor:
    """Return the thread pool of this process; its threads start at first use."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="polyattn")


def _end_executor() -> None:
    """End the threads of the pool; the next call starts others.

    If the start of a thread is interrupted, the pool does not know the thread, and the interpreter would wait for it
    at its exit.
    """
    executor = _executor()
    _executor.cache_clear()
    executor.shutdown(wait=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_executor.cache_clear)
