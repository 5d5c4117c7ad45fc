"""Transfers: counting, logging and forbidding the arrays that change library or device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ._scopes import entered
from .backend import Array, Place
from .errors import ArgumentError, BackendMismatchError

__all__ = ["Crossing", "Transfers", "permit", "record", "transfers"]

logger = logging.getLogger("polyattn")


class Crossing(NamedTuple):
    """A transfer: one array that changed library or device."""

    what: str
    source: str
    target: str
    copied: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.source} -> {self.target} ({'copied' if self.copied else 'shared'})"


@dataclass
class Transfers:
    """The transfers in a ``with transfers(...)`` block."""

    mode: str
    crossings: list[Crossing] = field(default_factory=list)

    @property
    def count(self) -> int:
        """The number of transfers."""
        return len(self.crossings)


_accounts: ContextVar[tuple[Transfers, ...]] = ContextVar("polyattn_transfers", default=())


@contextmanager
def transfers(mode: Literal["allow", "log", "forbid"] = "allow") -> Iterator[Transfers]:
    """Record every array that polyattn moves between libraries or devices.

    Parameters
    ----------
    mode : {"allow", "log", "forbid"}
        "log" also writes each transfer to the logger ``polyattn``; "forbid" raises before anything is moved.

    Yields
    ------
    Transfers
        With ``count``, and ``crossings``: name, source and target of each array, and whether it was copied.

    Raises
    ------
    BackendMismatchError
        In mode "forbid", at the first array that would be moved.
    ArgumentError
        If ``mode`` is none of these.

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
    yield from entered(_accounts, Transfers(mode))


def permit(x: Array, name: str, source: Place, target: Place) -> None:
    """Raise if an array may not be moved from ``source`` to ``target``."""
    reason = source.backend.state(x).captive
    if reason is not None and source.backend is not target.backend:
        raise BackendMismatchError(
            f"{name}: this array {reason}, so it cannot be moved from {source.backend.name} to {target}; "
            f"select {source.backend.name} or no backend"
        )
    if any(account.mode == "forbid" for account in _accounts.get()):
        raise BackendMismatchError(f"{name}: would go from {source} to {target}, and transfers are forbidden here")


def record(crossing: Crossing) -> None:
    """Add a transfer to all active accounts, and log it if one has mode "log"."""
    accounts = _accounts.get()
    for account in accounts:
        account.crossings.append(crossing)
    if any(account.mode == "log" for account in accounts):
        logger.info("transfer %s", crossing)
