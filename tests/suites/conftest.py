"""Running another project's pytest suite: as a whole, in a new process, without our settings."""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
# The suites of libraries that work on some of our backends only.
BACKENDS = {"keras": ("numpy", "torch", "jax"), "flax": ("jax",)}


def pytest_ignore_collect(collection_path, config):
    folder = collection_path.name if collection_path.parent == HERE else ""
    chosen = config.getoption("--polyattn-backend") or "numpy"
    return True if chosen not in BACKENDS.get(folder, (chosen,)) else None


class Run(NamedTuple):
    """Each test's outcome and the number of routed calls, both by the name of the test's module."""

    outcomes: dict[str, dict[str, str]]
    calls: dict[str, Counter]
    output: str

    def passed(self, module):
        return {test for test, outcome in self.outcomes.get(module, {}).items() if outcome == "passed"}


@pytest.fixture(scope="session")
def run_foreign(tmp_path_factory):
    """Return ``run_foreign(*arguments, plugin=FILE or None, **environment)``, which runs pytest and returns a Run."""

    def run(*arguments, plugin=None, **environment):
        folder = tmp_path_factory.mktemp("foreign")
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={folder}", "-p", "no:cacheprovider"]
        command += ["--quiet", "--tb=short", "--disable-warnings", "--junitxml=report.xml", *map(str, arguments)]
        env = {**os.environ, "POLYATTN_BACKEND": "", "POLYATTN_DEVICE": "", "PYTEST_ADDOPTS": "", **environment}
        if plugin is not None:
            command += ["-p", "routing", "-p", plugin.stem]
            env["PYTHONPATH"] = os.pathsep.join([str(HERE / "foreign"), str(plugin.parent)])
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        output = done.stdout + done.stderr
        assert done.returncode in (0, 1), output  # 1: tests failed, which the caller judges
        return read(folder / "report.xml", output)

    return run


def read(report, output):
    """Read a report in JUnit's format."""
    outcomes, calls = {}, defaultdict(Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
        *_, module, group = case.get("classname").split(".")
        outcomes.setdefault(module, {})[f"{group}.{case.get('name')}"] = kinds[0] if kinds else "passed"
    for counted in ElementTree.parse(report).iterfind("testsuite/properties/property"):
        module, _, name = counted.get("name").partition(": ")
        calls[module][name] += int(counted.get("value"))
    return Run(outcomes, calls, output)
