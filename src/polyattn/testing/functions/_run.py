"""Run the checks in a process of their own, so that a crash is a result."""

from __future__ import annotations

import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from ..._version import __version__
from ...errors import ArgumentError, PolyattnError
from ..check import Progress
from ..version import KIT_VERSION
from ._checks import CHECKS, OUTCOMES, CheckRow
from ._function import load_function

__all__ = ["FunctionReport", "check_function", "checks_named"]

LIMIT = 120.0  # seconds for one check
STARTUP = 300.0  # seconds for the import of a library


@dataclass(frozen=True)
class FunctionReport:
    """The results of all checks of one function: its name, its version, and a row for each check."""

    function: str
    version: str
    rows: tuple[CheckRow, ...]
    seconds: float

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows with each outcome."""
        return {outcome: sum(row.outcome == outcome for row in self.rows) for outcome in OUTCOMES}

    @property
    def faults(self) -> tuple[CheckRow, ...]:
        """The rows that are wrong, refused or crashed."""
        return tuple(row for row in self.rows if row.outcome in ("wrong", "refuses", "crashes"))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts and lists, for JSON."""
        return {
            "function": self.function,
            "version": self.version,
            "kit_version": KIT_VERSION,
            "polyattn": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "seconds": round(self.seconds, 3),
            **self.counts,
            "rows": [row._asdict() for row in self.rows],
        }


def checks_named(only: Sequence[str]) -> list[str]:
    """Return the checks whose names contain one of these words, or all; raise ArgumentError if there is none."""
    names = [name for name in CHECKS if not only or any(word in name for word in only)]
    if not names:
        groups = ", ".join(dict.fromkeys(name.partition(".")[0] for name in CHECKS))
        raise ArgumentError(f"checks: expected names or parts of names (groups: {groups}), got {', '.join(only)}")
    return names


def check_function(
    name: str,
    *,
    only: Sequence[str] = (),
    limit: float = LIMIT,
    progress: Callable[[Progress], None] | None = None,
) -> FunctionReport:
    """Check an attention function of any library.

    Parameters
    ----------
    name : str
        An adapter that polyattn ships, the path of an adapter file, or a dotted name: see :func:`load_function`.
    only : sequence of str
        Run only checks whose names contain one of these words.
    limit : float
        The seconds after which a check that does not answer counts as a crash.
    progress : callable, optional
        Called after each check with a :class:`~polyattn.testing.Progress`.

    Raises
    ------
    ArgumentError, BackendUnavailableError
        If there is no such function or check, or its library cannot be used.

    Examples
    --------
    >>> report = check_function("polyattn-numpy", only=["causal.square"])
    >>> report.counts["right"]
    1
    """
    names, start = checks_named(only), time.perf_counter()
    rows: list[CheckRow] = []
    identity = {"name": name, "version": ""}
    while len(rows) < len(names):
        before = len(rows)
        for message in _messages(name, names[before:], limit):
            identity |= {key: message[key] for key in ("name", "version") if key in message}
            if "row" not in message:
                continue
            rows.append(CheckRow(*message["row"]))
            if progress is not None:
                faults = sum(row.outcome in ("wrong", "refuses", "crashes") for row in rows)
                progress(Progress(len(rows), len(names), faults))
        if len(rows) == before:
            load_function(name)  # the clear error, if the function cannot be loaded here either
            raise PolyattnError(f"the checks of {name} could not be run: their process ended before the first")
    return FunctionReport(identity["name"], identity["version"], tuple(rows), time.perf_counter() - start)


def _messages(name: str, names: Sequence[str], limit: float) -> Iterator[dict[str, Any]]:
    """Yield the messages of one process; and if it ends within a check, a row that says so."""
    command = [sys.executable, "-m", f"{__package__}._worker", name, *names]
    with tempfile.TemporaryFile() as errors:
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=_environment())
        lines: queue.Queue[bytes] = queue.Queue()
        assert run.stdout is not None
        threading.Thread(target=_read, args=(run.stdout, lines), daemon=True).start()
        started = running = ""
        try:
            while line := _next(lines, limit if started else STARTUP):
                message = json.loads(line)
                running = message.get("start", "")
                started = started or running
                yield message
            if running:
                detail = _ending(run.returncode, errors) if _ended(run) else f"no answer in {limit:.0f} s"
                yield {"row": CheckRow(running, "crashes", detail)}
        finally:
            run.kill()
            run.wait()
            run.stdout.close()


def _environment() -> dict[str, str]:
    """Return the environment without a selection of a backend: each function computes on its own library."""
    return {key: value for key, value in os.environ.items() if key not in ("POLYATTN_BACKEND", "POLYATTN_DEVICE")}


def _read(stream: IO[bytes], lines: queue.Queue[bytes]) -> None:
    """Put the lines of a stream into a queue, and an empty one at its end."""
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _next(lines: queue.Queue[bytes], limit: float) -> bytes:
    try:
        return lines.get(timeout=limit)
    except queue.Empty:
        return b""


def _ended(run: subprocess.Popen[bytes]) -> bool:
    """Return whether a process, whose output may have ended a moment before itself, has ended."""
    try:
        run.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return False
    return True


def _ending(code: int, errors: IO[bytes]) -> str:
    """Return the signal or exit code with which a process ended, and the last line that it printed."""
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    errors.seek(0)
    last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    return f"{name}{': ' if last else ''}{last[:200]}"
