"""The kit itself: it fails what is wrong, refuses what is missing, and holds plugins to what they declare."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyattn as pa
from polyattn.testing import KIT_VERSION, run_check

STAND_INS = Path(__file__).parents[1] / "stand_ins"
CHECKS = ("-k", "contract and (identity or registry_finds or listed)")


@pytest.fixture
def crooked(site, monkeypatch):
    """Return a function that installs the crooked plugin, with what it declares, for the processes started here."""
    pytest.importorskip("array_api_strict", reason="the crooked plugin is made from array-api-strict's")

    def install(expected):
        monkeypatch.setenv("CROOKED", json.dumps(expected))
        site.add("crooked", (STAND_INS / "crooked.py").read_text())
        monkeypatch.setenv("PYTHONPATH", str(site.folder), prepend=os.pathsep)

    return install


def pytest_run(*arguments):
    """Run the kit as a stranger does."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "polyattn.testing.plugin", "-p", "no:cacheprovider"]
    command += ["--pyargs", "polyattn.testing.conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def check_crooked():
    """Run three checks on the crooked plugin, in a process where it is installed."""
    script = "import json; from polyattn.testing import run_check\n"
    script += f"print(json.dumps(run_check('crooked', pytest_args={CHECKS!r}).to_dict()))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    return report, {row["check"]: row for row in report["rows"]}


def test_report():
    report = run_check("numpy", pytest_args=("-k", "functional and softmax"))
    assert report.kit_version == KIT_VERSION
    assert report.backend == "numpy"
    assert report.library_version
    assert report.passed == len(report.rows) > 5
    assert report.failed == report.declared == 0
    assert f"conformance kit {KIT_VERSION}: backend numpy" in report.output
    assert report.to_dict()["rows"][0].keys() == {"check", "outcome", "detail"}


def test_a_wrong_backend_fails(crooked):
    crooked({})
    report, rows = check_crooked()
    assert rows["contract.registry_finds_the_owner"]["outcome"] == "failed"
    assert rows["contract.registry_finds_the_owner"]["detail"]
    assert rows["contract.identity"]["outcome"] == "passed"
    assert (report["passed"], report["failed"], report["declared"]) == (2, 1, 0)


def test_a_declared_failure(crooked):
    crooked({"contract.registry_finds_the_owner": "its arrays are another's"})
    report, rows = check_crooked()
    assert rows["contract.registry_finds_the_owner"]["outcome"] == "declared"
    assert "another's" in rows["contract.registry_finds_the_owner"]["detail"]
    assert (report["failed"], report["declared"]) == (0, 1)


def test_a_declared_failure_that_passes_fails(crooked):
    crooked({"contract.identity": "it is not"})
    _, rows = check_crooked()
    assert rows["contract.identity"]["outcome"] == "failed"
    assert "XPASS(strict)" in rows["contract.identity"]["detail"]


def test_a_declaration_of_no_check_is_refused(crooked):
    crooked({"contract.no_such_check": "it is not there"})
    run = pytest_run("--polyattn-backend=crooked", *CHECKS)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "contract.no_such_check" in run.stderr + run.stdout


def test_a_backend_that_is_missing_fails_the_run():
    run = pytest_run("--polyattn-backend=nunpy")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "numpy" in run.stderr
    assert "Traceback" not in run.stderr
    with pytest.raises(pa.UnknownBackendError, match="numpy"):
        run_check("nunpy")


def test_a_namespace_that_is_missing_fails_the_run():
    run = pytest_run("--polyattn-namespace=no_such_arrays")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "no_such_arrays" in run.stderr
    with pytest.raises(pa.UnknownBackendError, match="no_such_arrays"):
        run_check("no_such_arrays", namespace=True)


def test_both_options_exclude_each_other():
    run = pytest_run("--polyattn-backend=numpy", "--polyattn-namespace=numpy")
    assert run.returncode == pytest.ExitCode.USAGE_ERROR


def test_the_environment_selects_nothing():
    """A variable of the caller's does not change what is checked."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "polyattn.testing.plugin", "-p", "no:cacheprovider"]
    command += ["--pyargs", "polyattn.testing.conformance", "-k", "nothing_selected"]
    environment = {**os.environ, "POLYATTN_BACKEND": "no-such-backend"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment)
    assert run.returncode == 0, run.stdout


def test_a_library_without_a_plugin(monkeypatch):
    """The generic path, by the standard alone, on arrays of a type that no plugin claims."""
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS), prepend=os.pathsep)
    monkeypatch.syspath_prepend(str(STAND_INS))
    report = run_check("foreign_arrays", namespace=True)
    assert report.namespace
    assert report.library_version == "0.1"
    assert [row for row in report.rows if row.outcome == "failed"] == []
    assert report.passed > 200
