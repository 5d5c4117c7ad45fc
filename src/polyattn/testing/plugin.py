"""The pytest plugin of the conformance kit; opt in with ``-p polyattn.testing.plugin``.

Options: ``--polyattn-backend=NAME`` (numpy by default) or
``--polyattn-namespace=MODULE``, and ``--polyattn-report=FILE`` for the results as
JSON. If the chosen library cannot be used, the run stops with an error; nothing is
skipped.

Fixtures for checks: ``backend`` (the name), ``xp``, ``make(array, dtype)``,
``to_np(x)``, ``dtypes``, ``contract`` (the plugin's object; checks that use it are
left out for a bare namespace), ``target`` (all of these), and ``dtype``: a check
that uses it is run for each dtype.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..backend import Array, Backend
from ..errors import PolyattnError
from ._recorder import NOTE, Recorder
from .target import Target, open_backend, open_namespace
from .version import KIT_VERSION

CONFORMANCE = Path(__file__).parent / "conformance"
TARGET = pytest.StashKey[Target]()
RECORDER = pytest.StashKey[Recorder]()
MAPPINGS = Path("/proc/self/maps")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("polyattn", "polyattn conformance kit")
    group.addoption("--polyattn-backend", metavar="NAME", help="the backend to check (default: numpy)")
    group.addoption("--polyattn-device", metavar="NAME", help="the device of the arrays (default: the backend's first)")
    group.addoption("--polyattn-namespace", metavar="MODULE", help="check an array API namespace without a plugin")
    group.addoption("--polyattn-report", metavar="FILE", help="write the result of every check to FILE as JSON")
    group.addoption("--polyattn-progress", metavar="FILE", help="write the progress of the run to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Load the library under test, or stop the run with the reason."""
    name, module = config.getoption("--polyattn-backend"), config.getoption("--polyattn-namespace")
    if name and module:
        raise pytest.UsageError("--polyattn-backend and --polyattn-namespace exclude each other")
    try:
        config.stash[TARGET] = (
            open_namespace(module) if module else open_backend(name or "numpy", config.getoption("--polyattn-device"))
        )
    except (PolyattnError, ImportError) as error:
        asked = module or name or "numpy"
        raise pytest.UsageError(f"polyattn: {asked} cannot be used: {error}") from error
    progress = None if hasattr(config, "workerinput") else config.getoption("--polyattn-progress")
    recorder = Recorder(config.stash[TARGET], config.getoption("--polyattn-report"), progress)
    config.stash[RECORDER] = recorder
    config.pluginmanager.register(recorder, "polyattn-recorder")


def pytest_report_header(config: pytest.Config) -> str:
    """Return the header: the library under test and the version of the kit."""
    target = config.stash[TARGET]
    kind = "namespace" if target.contract is None else "backend"
    return f"polyattn conformance kit {KIT_VERSION}: {kind} {target.name} {target.version} ({', '.join(target.dtypes)})"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a check that takes ``dtype`` for each dtype of the library."""
    if "dtype" in metafunc.fixturenames and not any(
        "dtype" in re.findall(r"\w+", str(mark.args[0])) for mark in metafunc.definition.iter_markers("parametrize")
    ):
        metafunc.parametrize("dtype", metafunc.config.stash[TARGET].dtypes)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out checks that need a plugin if there is none, and mark the failures that the plugin declares."""
    target = config.stash[TARGET]
    if target.contract is None:
        left_out = [item for item in items if "contract" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=left_out)
        config.stash[RECORDER].left_out = len(left_out)
        items[:] = [item for item in items if item not in left_out]
    checks = {item: check_name(item) for item in items if item.path.parent == CONFORMANCE}
    declared = target.expected_failures
    for item, name in checks.items():
        reason = declared.get(name, declared.get(name.partition("[")[0]))
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    known = {*checks.values(), *(name.partition("[")[0] for name in checks.values())}
    whole = {item.path for item in checks} == set(CONFORMANCE.glob("test_*.py"))
    if whole and not set(declared) <= known:
        unknown = ", ".join(sorted(set(declared) - known))
        raise pytest.UsageError(f"polyattn: {target.name} declares failures of checks that do not exist: {unknown}")


def check_name(item: pytest.Item) -> str:
    """Return a check's name: ``attention.forward[causal]`` for ``test_attention.py::test_forward[causal]``."""
    return f"{item.path.stem.removeprefix('test_')}.{item.name.removeprefix('test_')}"


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Forget compiled programs between two files of tests: the tests of one file share them."""
    if nextitem is None or nextitem.path != item.path:
        forget_programs()


def forget_programs() -> None:
    """Forget the programs that JAX compiled where this process has many memory mappings.

    Linux allows 65,530. Each compiled program takes some, and the compiler crashes where there are none left.
    """
    if "jax" in sys.modules and MAPPINGS.exists():
        with MAPPINGS.open("rb") as lines:
            many = sum(1 for _ in lines) > 25_000
        if many:
            sys.modules["jax"].clear_caches()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add to pytest's report of a check its name, its outcome and the reason."""
    report = yield
    if item.path.parent == CONFORMANCE and (report.when == "call" or report.outcome != "passed"):
        declared = hasattr(report, "wasxfail") and report.outcome == "skipped"
        outcome = "declared" if declared else report.outcome
        detail = str(report.wasxfail) if declared else _summary(report)
        setattr(report, NOTE, (check_name(item), outcome, detail))
    return report


def _summary(report: pytest.TestReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):  # a skip: the file, the line and the reason
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    first, *rest = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return f"{first} {rest[0]}" if first.endswith("Error:") and rest else first  # NumPy's begins on line two


@pytest.fixture(autouse=True)
def _nothing_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the caller's selection from the environment: each check selects for itself."""
    monkeypatch.delenv("POLYATTN_BACKEND", raising=False)
    monkeypatch.delenv("POLYATTN_DEVICE", raising=False)


@pytest.fixture(scope="session")
def target(pytestconfig: pytest.Config) -> Target:
    """Return the library under test."""
    return pytestconfig.stash[TARGET]


@pytest.fixture(scope="session")
def backend(target: Target) -> str:
    """Return its name."""
    return target.name


@pytest.fixture(scope="session")
def contract(target: Target) -> Backend:
    """Return the plugin's object."""
    assert target.contract is not None, "a check of the contract was collected for a bare namespace"
    return target.contract


@pytest.fixture(scope="session")
def xp(target: Target) -> Any:
    """Return its array API namespace."""
    return target.xp


@pytest.fixture(scope="session")
def make(target: Target) -> Callable[..., Array]:
    """Return ``make(array, dtype="float64")``: an array of the library."""
    return target.make


@pytest.fixture(scope="session")
def to_np(target: Target) -> Callable[[Array], Any]:
    """Return ``to_np(x)``: the array on the host, 16-bit floats as float32."""
    return target.to_np


@pytest.fixture(scope="session")
def dtypes(target: Target) -> tuple[str, ...]:
    """Return the floating dtypes that the library has here."""
    return target.dtypes
