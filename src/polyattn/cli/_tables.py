"""Tables on the terminal, and of unlimited width in a file."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_table"]


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
