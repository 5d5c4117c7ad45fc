"""Run the whole kit on one backend, and say what is right and what is not."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import registry
from ..errors import PolyattnError, UnknownBackendError
from .version import KIT_VERSION

__all__ = ["Report", "Row", "run_check"]

# The kit's own settings: a pytest configuration that lies about does not reach it.
_SETTINGS = "[pytest]\nfilterwarnings =\n    error::RuntimeWarning\nxfail_strict = true\n"


@dataclass(frozen=True)
class Row:
    """One check: its name, ``"passed"``, ``"failed"``, ``"declared"`` or ``"skipped"``, and why."""

    check: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """What the kit found.

    ``passed``, ``failed`` and ``declared`` (failures that the plugin itself
    expects) are the numbers of such rows; ``output`` is what pytest printed.
    """

    backend: str
    library_version: str
    namespace: bool
    kit_version: str
    rows: tuple[Row, ...]
    output: str

    @property
    def passed(self) -> int:
        """How many checks passed."""
        return self._count("passed")

    @property
    def failed(self) -> int:
        """How many failed without being declared, or passed though a failure was declared."""
        return self._count("failed")

    @property
    def declared(self) -> int:
        """How many failed as the plugin says that they do."""
        return self._count("declared")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        return {
            "backend": self.backend,
            "library_version": self.library_version,
            "namespace": self.namespace,
            "kit_version": self.kit_version,
            "passed": self.passed,
            "failed": self.failed,
            "declared": self.declared,
            "rows": [asdict(row) for row in self.rows],
        }

    def _count(self, outcome: str) -> int:
        return sum(row.outcome == outcome for row in self.rows)


def run_check(name: str, *, namespace: bool = False, pytest_args: Sequence[str] = ()) -> Report:
    """Run every check on a backend, in a process of its own.

    Parameters
    ----------
    name : str
        The backend; with ``namespace``, the module of an array API namespace, for which no plugin is needed.
    namespace : bool
        Whether ``name`` is a module.
    pytest_args : sequence of str
        Passed on, ``("-k", "attention")`` for instance.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If there is no such backend or module, or it cannot be used here.
    PolyattnError
        If the checks could not be run at all; the message ends with what pytest said.
    """
    if importlib.util.find_spec("pytest") is None:
        raise PolyattnError('the conformance kit needs pytest; install it with: pip install "polyattn[test]"')
    if not namespace:
        name = registry.ready(name).name
    else:
        _expect_namespace(name)
    with tempfile.TemporaryDirectory(prefix="polyattn-check-") as folder:
        settings, report = Path(folder, "pytest.ini"), Path(folder, "report.json")
        settings.write_text(_SETTINGS, encoding="utf-8")
        option = "--polyattn-namespace" if namespace else "--polyattn-backend"
        command = [
            *(sys.executable, "-m", "pytest", "-c", str(settings), "-p", "polyattn.testing.plugin"),
            *("-p", "no:cacheprovider", "--pyargs", "polyattn.testing.conformance"),
            *(f"{option}={name}", f"--polyattn-report={report}", *pytest_args),
        ]
        environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        output = run.stdout + run.stderr
        if run.returncode == 5:
            raise PolyattnError(f"none of the checks is selected by: {' '.join(pytest_args)}")
        if not report.exists() or run.returncode not in (0, 1):
            problem = f"the checks of {name} could not be run (pytest ended with {run.returncode})"
            raise PolyattnError(f"{problem}:\n{output.strip()}")
        found = json.loads(report.read_text(encoding="utf-8"))
    rows = tuple(Row(**row) for row in found["rows"])
    return Report(found["backend"], found["library_version"], namespace, KIT_VERSION, rows, output)


def _expect_namespace(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except (ImportError, ValueError) as cause:  # ValueError: no name at all
        raise UnknownBackendError(f"namespace: the module {name!r} cannot be imported here: {cause}") from cause
    if not hasattr(module, "asarray"):
        raise UnknownBackendError(f"namespace: expected the module of an array API namespace, got {name!r}")
