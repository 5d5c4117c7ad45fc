"""Run the whole kit on one backend, and report the checks that pass and those that fail."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from .. import registry
from .._generic import FUNCTIONS, GenericBackend
from .._version import __version__
from ..errors import PolyattnError, UnknownBackendError
from .version import KIT_VERSION

__all__ = ["Progress", "Report", "Row", "run_check"]

# The kit's own settings, so that it ignores other configurations of pytest.
_SETTINGS = "[pytest]\nfilterwarnings =\n    error::RuntimeWarning\nxfail_strict = true\n"


class Progress(NamedTuple):
    """The progress of a run: finished checks, all checks (0 while they are collected), and failures."""

    done: int
    total: int
    failed: int


@dataclass(frozen=True)
class Row:
    """One check: its name, the outcome ``"passed"``, ``"failed"``, ``"declared"`` or ``"skipped"``, and the reason."""

    check: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """The results of the kit.

    ``passed``, ``failed``, ``declared`` (failures that the plugin declares) and
    ``skipped`` are the numbers of such rows; ``left_out`` is the number of checks
    that were not run because they need a plugin. ``output`` is the output of
    pytest; ``versions`` has polyattn, Python, NumPy and pytest. ``owner`` is the
    plugin that owns the arrays of a namespace, and so computes with them.
    """

    backend: str
    library_version: str
    namespace: bool
    kit_version: str
    rows: tuple[Row, ...]
    output: str
    left_out: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    platform: str = ""
    owner: str = ""

    @property
    def passed(self) -> int:
        """The number of checks that passed."""
        return self._count("passed")

    @property
    def failed(self) -> int:
        """The number that failed without a declaration, or passed although a failure is declared."""
        return self._count("failed")

    @property
    def declared(self) -> int:
        """The number that failed as declared by the plugin."""
        return self._count("declared")

    @property
    def skipped(self) -> int:
        """The number that could not be run on this machine, each with its reason."""
        return self._count("skipped")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts and lists, for JSON."""
        return {
            "backend": self.backend,
            "library_version": self.library_version,
            "namespace": self.namespace,
            "owner": self.owner,
            "kit_version": self.kit_version,
            "versions": self.versions,
            "platform": self.platform,
            "seconds": round(self.seconds, 3),
            "passed": self.passed,
            "failed": self.failed,
            "declared": self.declared,
            "skipped": self.skipped,
            "left_out": self.left_out,
            "rows": [asdict(row) for row in self.rows],
        }

    def _count(self, outcome: str) -> int:
        return sum(row.outcome == outcome for row in self.rows)


def run_check(
    name: str,
    *,
    namespace: bool = False,
    pytest_args: Sequence[str] = (),
    progress: Callable[[Progress], None] | None = None,
) -> Report:
    """Run every check on a backend, in a new process.

    Parameters
    ----------
    name : str
        The backend; with ``namespace``, the module of an array API namespace, for which no plugin is needed.
    namespace : bool
        Whether ``name`` is a module.
    pytest_args : sequence of str
        More arguments for pytest, ``("-k", "attention")`` for instance.
    progress : callable, optional
        Called a few times a second with a :class:`Progress`.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If there is no such backend or module, or it cannot be used on this machine.
    PolyattnError
        If the checks could not be run at all; the message ends with pytest's output.
    """
    if importlib.util.find_spec("pytest") is None:
        raise PolyattnError('the conformance kit needs pytest; install it with: pip install "polyattn[test]"')
    owner = _owner_in(name) if namespace else ""
    if not namespace:
        name = registry.ready(name).name
    start = time.perf_counter()
    try:
        found, output = _found(name, namespace, pytest_args, progress)
    except OSError as cause:
        raise PolyattnError(
            f"the checks of {name} could not be run: their temporary files failed: {cause}; make room, or set TMPDIR to"
            " another folder"
        ) from cause
    if not found["rows"]:
        raise PolyattnError(f"not one check of {name} was run by: {' '.join(pytest_args)}")
    versions = {name: metadata.version(name) for name in ("numpy", "pytest")}
    return Report(
        found["backend"], found["library_version"], namespace, KIT_VERSION, tuple(Row(**row) for row in found["rows"]),
        output, found["left_out"], time.perf_counter() - start,
        {"polyattn": __version__, "python": platform.python_version(), **versions}, platform.platform(), owner,
    )  # fmt: skip


def _found(
    name: str, namespace: bool, pytest_args: Sequence[str], progress: Callable[[Progress], None] | None
) -> tuple[dict[str, Any], str]:
    """Run the kit, and return its report and the output of pytest."""
    with tempfile.TemporaryDirectory(prefix="polyattn-check-") as folder:
        returned, output = _run_kit(Path(folder), name, namespace, pytest_args, progress)
        if returned == 5:
            raise PolyattnError(f"none of the checks is selected by: {' '.join(pytest_args)}")
        report = Path(folder, "report.json")
        if not report.exists() or returned not in (0, 1):
            problem = f"the checks of {name} could not be run (pytest ended with {returned})"
            raise PolyattnError(f"{problem}:\n{output.strip()}")
        return json.loads(report.read_text(encoding="utf-8")), output


def _run_kit(
    folder: Path, name: str, namespace: bool, pytest_args: Sequence[str], progress: Callable[[Progress], None] | None
) -> tuple[int, str]:
    """Run pytest in a new process and report its progress; return its exit code and its output."""
    settings, done, printed = folder / "pytest.ini", folder / "progress", folder / "output"
    settings.write_text(_SETTINGS, encoding="utf-8")
    option = "--polyattn-namespace" if namespace else "--polyattn-backend"
    command = [
        *(sys.executable, "-m", "pytest", "-c", str(settings), "-p", "polyattn.testing.plugin"),
        *("-p", "no:cacheprovider", "--pyargs", "polyattn.testing.conformance", f"{option}={name}"),
        *(f"--polyattn-report={folder / 'report.json'}", f"--polyattn-progress={done}", *pytest_args),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    with printed.open("wb") as stream:
        run = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=environment)
        try:
            while run.poll() is None:
                if progress is not None:
                    progress(_read_progress(done))
                try:
                    run.wait(timeout=0.25)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            run.kill()  # after an interrupt; no effect if it has ended
            run.wait()
    return run.returncode, printed.read_text(encoding="utf-8", errors="replace")


def _read_progress(path: Path) -> Progress:
    """Read the pytest plugin's progress file: the number of checks, then the outcome of each, on one line each."""
    words = path.read_text(encoding="utf-8").split() if path.exists() else []
    return Progress(max(len(words) - 1, 0), int(words[0]) if words else 0, words.count("failed"))


def _owner_in(name: str) -> str:
    """Return the name of the plugin that owns a namespace's arrays, "" if none; raise if it is not a namespace."""
    try:
        module = importlib.import_module(name)
    except Exception as cause:  # any error of the import; ValueError for an empty name
        raise UnknownBackendError(f"namespace: the module {name!r} cannot be imported here: {cause}") from cause
    if missing := [function for function in FUNCTIONS if not hasattr(module, function)]:
        raise UnknownBackendError(
            f"namespace: expected the module of an array API namespace, got {name!r}, which lacks {', '.join(missing)}"
        )
    try:
        owner = registry.owner(module.asarray([0.0]), "its arrays")
    except Exception as cause:
        raise UnknownBackendError(f"namespace: {name!r} cannot be checked without a plugin: {cause}") from cause
    return "" if isinstance(owner, GenericBackend) else owner.name
