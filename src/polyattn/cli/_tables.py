"""Tables on the terminal, and of unlimited width in a file."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["named", "print_outcomes", "print_table"]


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    sections: Collection[int] = (),
) -> None:
    """Print a table; the columns ``numbers`` are aligned right, and a line follows each row of ``sections``."""
    table = Table()
    for index, column in enumerate(columns):
        right = column in numbers
        table.add_column(column, overflow="fold", no_wrap=index == 0 or right, justify="right" if right else "left")
    for index, row in enumerate(rows):
        table.add_row(*(Text(cell) for cell in row), end_section=index in sections)
    console = Console()
    if not console.is_terminal:  # a file has no width: lines are not wrapped
        console.width = 1000
    console.print(table)


def print_outcomes(rows: Iterable[tuple[str, str]], outcomes: Sequence[str]) -> None:
    """Print how many checks of each group have each outcome; a row is the name of a check, ``group.what``, and one."""
    groups: dict[str, dict[str, int]] = {}
    for check, outcome in rows:
        counts = groups.setdefault(check.partition(".")[0], dict.fromkeys(outcomes, 0))
        counts[outcome] += 1
    cells = [(name, *(str(count or "") for count in counts.values())) for name, counts in groups.items()]
    print_table(("checks of", *outcomes), cells, numbers=outcomes)


def named(checks: Sequence[str]) -> str:
    """Return the first name, and the number of the others."""
    return checks[0] + (f" and {len(checks) - 1} more" if len(checks) > 1 else "")
