"""Where something is computed, and what a forward pass leaves there for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ..kernels import Array, RowStatistics
from ._contract import Backend

__all__ = ["Cache", "Place"]


class Place(NamedTuple):
    """A library and a device of it. ``device`` is None where a trace hides it: it is then whatever the library uses."""

    backend: Backend
    device: str | None

    def __str__(self) -> str:
        return self.backend.name if self.device is None else f"{self.backend.name} on {self.device}"

    def __repr__(self) -> str:
        return f"<{self}>"


@dataclass(frozen=True, eq=False)
class Cache:
    """What a forward pass leaves for its backward: arrays and static settings, nothing else.

    ``place`` is the backend and device that computed it, ``kernel`` the attention
    kernel; its backward runs there, whatever is selected by then. ``home`` is
    where the inputs came from and where their gradients go. Inputs and results
    are referred to, not copied: changing either before the backward is undefined.
    """

    op: str
    arrays: tuple[Any, ...]
    static: tuple[tuple[str, Any], ...]
    place: Place
    home: Place
    kernel: str | None = None
    lse: Array = field(default=None, repr=False)
    row_statistics: RowStatistics | None = field(default=None, repr=False)

    DATA_FIELDS: ClassVar[tuple[str, ...]] = ("arrays", "lse", "row_statistics")
    STATIC_FIELDS: ClassVar[tuple[str, ...]] = ("op", "static", "place", "home", "kernel")

    def __repr__(self) -> str:
        return f"<cache of {self.op} on {self.place}>"
