"""Collecting the outcome of each check, and writing the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .target import Target
from .version import KIT_VERSION

__all__ = ["NOTE", "Recorder"]

NOTE = "polyattn_check"
"""The attribute of a pytest report that has (check, outcome, detail); pytest-xdist carries it between processes."""


class Recorder:
    """Collects the outcomes in the main process, to which pytest-xdist's workers report.

    ``report`` is the file for the results. ``progress`` is a file with one word on each line: the number of checks,
    then the outcome of each finished check.
    """

    def __init__(self, target: Target, report: str | None, progress: str | None) -> None:
        self.target = target
        self.report = report
        self.progress = progress
        self.rows: dict[str, dict[str, str]] = {}
        self.left_out = 0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Write the number of checks."""
        self._tell(str(len(session.items)))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Write the number of checks that worker processes collect; it is the same in each."""
        if self.progress is not None and not Path(self.progress).exists():
            self._tell(str(len(ids)))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Read from a worker the number of checks that were left out."""
        self.left_out = getattr(node, "workeroutput", {}).get(NOTE, self.left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record an outcome; a later one does not replace a failure of the same check."""
        if not hasattr(report, NOTE):
            return
        check, outcome, detail = getattr(report, NOTE)
        if check not in self.rows:
            self._tell(outcome)
        if self.rows.get(check, {}).get("outcome") != "failed":
            self.rows[check] = {"check": check, "outcome": outcome, "detail": detail}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the report; a worker only reports the number of checks that it left out."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[NOTE] = self.left_out
        elif self.report:
            target = self.target
            head = {"kit_version": KIT_VERSION, "backend": target.name, "library_version": target.version}
            found = {**head, "left_out": self.left_out, "rows": list(self.rows.values())}
            Path(self.report).write_text(json.dumps(found), encoding="utf-8")

    def _tell(self, word: str) -> None:
        if self.progress is not None:
            with Path(self.progress).open("a", encoding="utf-8") as stream:
                stream.write(word + "\n")
