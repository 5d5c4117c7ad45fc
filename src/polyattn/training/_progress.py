"""The progress of a run on standard error: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Reporter"]

SECONDS_BETWEEN_LINES = 2.0


class Reporter(AbstractContextManager["Reporter"]):
    """The progress of one run from step ``start`` to ``total``; nothing is printed unless ``shown``."""

    def __init__(self, start: int, total: int, console: Console | None = None, shown: bool = True) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True, quiet=not shown)
        self._start, self._total = start, total
        texts = ("loss {task.fields[loss]}", "{task.fields[speed]} steps/s", "ETA")
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), *map(TextColumn, texts))
        self._bar = Progress(
            *columns, TimeRemainingColumn(), console=self._console, disable=not self._console.is_terminal
        )
        self._task = self._bar.add_task("training", total=total, completed=start, loss=f"{'–':<8}", speed="–")

    def __enter__(self) -> Self:
        self._began = self._printed = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float) -> None:
        """Show that ``step`` steps are done and what the last loss was."""
        now = time.perf_counter()
        speed = f"{(step - self._start) / max(now - self._began, 1e-9):.0f}"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, loss=f"{loss:<8.3g}", speed=speed)
        elif now - self._printed >= SECONDS_BETWEEN_LINES or step == self._total:
            self._printed = now
            self.say(f"step {step}/{self._total}  loss {loss:.4g}  {speed} steps/s")

    def say(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False)
