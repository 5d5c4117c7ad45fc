"""What lasts as long as a ``with`` block, and no longer if an interrupt comes at its beginning or its end.

An interrupt (Ctrl-C, or an exception that another thread raises in this one) comes between any two steps of Python:
also after ``__enter__`` has changed something and before the block begins, and in ``__exit__`` before its first line.
A generator ends all the same: where it was not run to its end, it is closed when the exception has been handled.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextvars import ContextVar, copy_context
from typing import TypeVar

import numpy as np

__all__ = ["Scope", "entered", "silenced"]

T = TypeVar("T")


class Scope:
    """The context manager of a generator that yields once, and restores in ``finally`` what it changed.

    As ``contextlib.contextmanager``, in half its time, because a small call takes some microseconds; the generator does
    not see exceptions of the block.
    """

    __slots__ = ("steps",)

    def __init__(self, steps: Generator[None]) -> None:
        self.steps = steps

    def __enter__(self) -> None:
        next(self.steps)

    def __exit__(self, *raised: object) -> None:
        for _ in self.steps:
            pass


def silenced() -> Scope:
    """Return a context without floating-point warnings of NumPy: inf and NaN are valid results."""
    return Scope(_without_warnings())


def _without_warnings() -> Generator[None]:
    before = copy_context()
    try:
        with np.errstate(all="ignore"):
            yield
    except BaseException:  # an interrupt, which leaves the settings of errstate
        np.seterr(**before.run(np.geterr))
        raise


def entered(variable: ContextVar[tuple[T, ...]], entry: T) -> Iterator[T]:
    """Yield an entry that is the variable's last one until then: the body of a context manager.

    Removing is done again if it is interrupted, and removes this entry only: not by a token, since a generator may be
    closed in another context or order.
    """
    try:
        variable.set((*variable.get(), entry))
        yield entry
    finally:
        try:
            _remove(variable, entry)
        except BaseException:
            _remove(variable, entry)
            raise


def _remove(variable: ContextVar[tuple[T, ...]], entry: T) -> None:
    variable.set(tuple(other for other in variable.get() if other is not entry))
