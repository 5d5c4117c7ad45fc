"""The place of a computation, and the cache that a forward returns for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from ..kernels import Array, Record, RowStatistics
from ._contract import Backend

__all__ = ["Cache", "Place"]


class Place(NamedTuple):
    """A library and one of its devices. ``device`` is None if a trace hides it; the library then chooses it."""

    backend: Backend
    device: str | None

    def __str__(self) -> str:
        return self.backend.name if self.device is None else f"{self.backend.name} on {self.device}"

    def __repr__(self) -> str:
        return f"<{self}>"


@dataclass(frozen=True, eq=False)
class Cache(Record):
    """What a forward returns for its backward: only arrays and static values.

    ``place`` is the backend and device that computed the forward; the backward runs there, regardless of a later
    selection. ``kernel`` is the name of the attention kernel. ``home`` is the place of the inputs, to which their
    gradients are returned. Inputs and results are not copied: if one is modified before the backward, its result is
    undefined.
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
    """For attention: the statistics of each row of scores, in the inputs' library."""

    ARRAYS: ClassVar[tuple[str, ...]] = ("saved", "row_statistics")

    @property
    def lse(self) -> Array:
        """For attention: the log-sum-exp of each row of scores, in the inputs' library."""
        return None if self.row_statistics is None else self.row_statistics.lse

    def __repr__(self) -> str:
        return f"<cache of {self.op} on {self.place}>"
