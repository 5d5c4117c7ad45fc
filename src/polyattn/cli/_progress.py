"""The progress of checks on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from ..testing import check as engine

__all__ = ["progress_of"]


@contextmanager
def progress_of(name: str) -> Iterator[Callable[[engine.Progress], None]]:
    """Yield a function that shows finished, total and failed checks on standard error, if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(f"collecting the checks of {name}", total=None)

        def show(now: engine.Progress) -> None:
            if now.total:
                failed = f", {now.failed} failed" if now.failed else ""
                bar.update(line, description=f"checking {name}{failed}", completed=now.done, total=now.total)

        yield show
