"""The account that is kept of arrays which change library or device, and what may not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .backend import Array, Place
from .errors import ArgumentError, BackendMismatchError

__all__ = ["Crossing", "Transfers", "permit", "record", "transfers"]

logger = logging.getLogger("polyattn")


class Crossing(NamedTuple):
    """One array that changed library or device."""

    what: str
    source: str
    target: str
    copied: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.source} -> {self.target} ({'copied' if self.copied else 'shared'})"


@dataclass
class Transfers:
    """The account of a ``with transfers(...)`` block."""

    mode: str
    crossings: list[Crossing] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many arrays crossed."""
        return len(self.crossings)


_accounts: ContextVar[tuple[Transfers, ...]] = ContextVar("polyattn_transfers", default=())


@contextmanager
def transfers(mode: Literal["allow", "log", "forbid"] = "allow") -> Iterator[Transfers]:
    """Keep account of every array that polyattn moves between libraries or devices.

    Parameters
    ----------
    mode : {"allow", "log", "forbid"}
        "log" also writes each crossing to the logger ``polyattn``; "forbid" raises before anything moves.

    Yields
    ------
    Transfers
        With ``count``, and ``crossings``: what went from where to where, copied or not.

    Raises
    ------
    BackendMismatchError
        In mode "forbid", at the first array that would have crossed.
    ArgumentError
        If there is no such mode.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> with pa.transfers("forbid") as account:
    ...     y = pa.functional.softmax(np.zeros((2, 4)))
    >>> account.count
    0
    """
    if mode not in ("allow", "log", "forbid"):
        raise ArgumentError(f"mode: expected 'allow', 'log' or 'forbid', got {mode!r}")
    account = Transfers(mode)
    _accounts.set((*_accounts.get(), account))
    try:
        yield account
    finally:
        _accounts.set(tuple(other for other in _accounts.get() if other is not account))


def permit(x: Array, name: str, home: Place, place: Place) -> None:
    """Raise where an array may not change its library or device."""
    reason = home.backend.state(x).captive
    if reason is not None and home.backend is not place.backend:
        raise BackendMismatchError(
            f"{name}: this array {reason}, so it cannot leave {home.backend.name} for {place}; "
            f"select {home.backend.name}, or no backend, for it"
        )
    if any(account.mode == "forbid" for account in _accounts.get()):
        raise BackendMismatchError(f"{name}: would go from {home} to {place}, and transfers are forbidden here")


def record(crossing: Crossing) -> None:
    """Write a crossing down, wherever one is asked to be."""
    accounts = _accounts.get()
    for account in accounts:
        account.crossings.append(crossing)
    if any(account.mode == "log" for account in accounts):
        logger.info("transfer %s", crossing)
