"""What a comparison found, as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ._case import Case

__all__ = ["OURS", "Report", "Row", "rated"]

OURS = "polyattn"


@dataclass(frozen=True)
class Row:
    """One contestant on one case.

    ``milliseconds`` is the median of the rounds, ``ratio`` the peer's median divided by polyattn's (above 1 polyattn
    is faster), ``error`` the largest difference from polyattn's results in units of their largest element, and
    ``memory_mib`` how far the call raised the resident set. None is what was not measured; ``note`` says why not.
    """

    peer: str
    shape: str
    what: str
    causal: bool
    dtype: str
    milliseconds: float | None = None
    ratio: float | None = None
    error: float | None = None
    memory_mib: float | None = None
    note: str = ""

    @classmethod
    def of(cls, case: Case, peer: str, **found: Any) -> Row:
        """Return the row of a contestant on a case."""
        return cls(peer, str(case.shape), case.what, case.causal, case.dtype, **found)


@dataclass(frozen=True)
class Report:
    """A comparison: where and how it was made, and a row for each contestant on each case."""

    task: str
    backend: str
    device: str
    rounds: int
    threads: dict[str, str]
    machine: dict[str, Any]
    versions: dict[str, str]
    absent: dict[str, str]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


def rated(rows: Sequence[Row], seconds: dict[str, list[float]]) -> list[Row]:
    """Return the rows of one case with their medians, and their ratios to polyattn's."""
    medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    return [
        replace(row, milliseconds=medians[row.peer], ratio=medians[row.peer] / medians[OURS])
        if row.peer in medians
        else row
        for row in rows
    ]
