"""Where something is computed, and what a forward pass leaves there for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ..kernels import Array, Record, RowStatistics
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
class Cache(Record):
    """What a forward pass leaves for its backward: arrays and static values, nothing else.

    ``place`` is the backend and device that computed it, ``kernel`` the name of the attention kernel; its backward
    runs there, whatever is selected by then. ``home`` is where the inputs came from and where their gradients go.
    Inputs and results are referred to, not copied: changing either before the backward is undefined.
    """

    op: str
    saved: Any
    """The record that the operation's native forward returned for its backward."""
    place: Place
    home: Place
    y_shape: tuple[int, ...]
    y_dtype: str
    """Shape and dtype of the result, which an upstream gradient must have."""
    kernel: str | None = None
    row_statistics: RowStatistics | None = field(default=None, repr=False)
    """Of attention: what the softmax of each row was divided by, in the inputs' library."""

    ARRAYS: ClassVar[tuple[str, ...]] = ("saved", "row_statistics")

    @property
    def lse(self) -> Array:
        """Of attention: the log-sum-exp of each row of scores, in the inputs' library."""
        return None if self.row_statistics is None else self.row_statistics.lse

    def __repr__(self) -> str:
        return f"<cache of {self.op} on {self.place}>"
