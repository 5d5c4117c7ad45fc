"""``polyattn check``: the printed report and the content of a report, on NumPy and on bare namespaces."""

import importlib
import json
import platform
import sys
from importlib import metadata
from typing import Any

import pytest

import polyattn as pa
from polyattn.errors import PolyattnError, UnknownBackendError
from polyattn.testing import KIT_VERSION, run_check
from polyattn.testing import check as check_module
from polyattn.testing.check import Progress, Report, Row

# A part that is soon collected and run: of test_functional.py and test_features.py, what is about softmax.
SOFTMAX = ("--ignore-glob=*/conformance/test_[!f]*", "-k", "softmax")
ROWS = (
    Row("linear.forward[float64]", "passed"),
    Row("softmax.backward[a-b]", "failed", "off by [one] 1e-2"),
    Row("softmax.forward", "passed"),
    Row("softmax.twice", "declared", "known"),
    Row("softmax.wide", "failed", "off by [one] 2e-3"),
)


def made_up(name: str, namespace: bool, **more: Any) -> Report:
    return Report(name, "1.0", namespace, "1.1", ROWS, "what pytest said", **more)


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace the kit by one with a failure; return the arguments of its calls."""
    calls: list[tuple[Any, ...]] = []

    def run_check(name: str, *, namespace: bool, pytest_args: Any, progress: Any) -> Report:
        calls.append((name, namespace, list(pytest_args)))
        progress(Progress(0, 0, 0))
        progress(Progress(1, 4, 1))
        return made_up(name, namespace, left_out=7 if namespace else 0)

    monkeypatch.setattr(check_module, "run_check", run_check)
    return calls


def cells(out: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]


def test_a_line_for_each_group_then_what_did_not_pass(command: Any, kit: list[tuple[Any, ...]]) -> None:
    code, out, err = command("check", "my_library", "--namespace", "--", "-x", "--lf")
    assert (code, err) == (1, "")
    assert kit == [("my_library", True, ["-x", "--lf"])]
    assert cells(out) == [
        ["linear", "1", "", "", ""],
        ["softmax", "1", "2", "1", ""],
        ["softmax.twice", "declared", "known"],
        ["softmax.backward[a-b] and 1 more", "failed", "off by [one] 1e-2"],
    ]
    assert "2 passed, 2 failed, 1 failed as declared" in out
    assert "7 more checks need a plugin" in out
    assert 'polyattn check --namespace my_library -v -- -k "test_softmax and test_backward"' in out
    assert "what pytest said" not in out


def test_verbose_lists_every_check_and_what_pytest_said(command: Any, kit: list[tuple[Any, ...]]) -> None:
    out = command("check", "numpy", "-v").out
    assert "what pytest said" in out
    assert [row[0] for row in cells(out)[2:]] == [
        "linear.forward[float64]", "softmax.forward", "softmax.twice", "softmax.backward[a-b]",
        "softmax.wide",
    ]  # fmt: skip


def test_as_json_it_fails_too(command: Any, kit: list[tuple[Any, ...]]) -> None:
    code, out, err = command("check", "numpy", "--json")
    assert (code, err) == (1, "")
    assert json.loads(out)["failed"] == 2
    assert kit == [("numpy", False, [])]


def test_who_computed_for_a_namespace_is_said(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        check_module, "run_check", lambda name, **_: made_up(name, True, owner="numpy", left_out=7)
    )  # fmt: skip
    out = command("check", "--namespace", "numpy").out
    assert "the backend numpy owns these arrays and computed with them: polyattn check numpy" in out
    assert "need a plugin" not in out


def test_what_selects_no_check_is_told(command: Any) -> None:
    told = command("check", "numpy", "--", "-k", "no_check_of_this_name").refused(1)
    assert told.endswith("none of the checks is selected by: -k no_check_of_this_name")


def test_temporary_files_that_fail_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/dev/null")
    with pytest.raises(PolyattnError, match=r"their temporary files failed: .*/dev/null.*; make room, or set TMPDIR"):
        run_check("numpy")


def test_what_runs_no_check_is_no_success() -> None:
    with pytest.raises(PolyattnError, match=r"not one check of numpy was run by: .*--collect-only"):
        run_check("numpy", pytest_args=(*SOFTMAX, "--collect-only"))


@pytest.fixture(scope="module")
def softmax() -> tuple[Report, list[Progress]]:
    """Run a part of the kit on NumPy; return the report, and each reported progress."""
    seen: list[Progress] = []
    return run_check("NumPy", pytest_args=SOFTMAX, progress=seen.append), seen


def test_the_report_says_what_was_run_where(softmax: tuple[Report, list[Progress]]) -> None:
    report = json.loads(json.dumps(softmax[0].to_dict()))
    assert report["backend"] == "numpy"
    assert report["kit_version"] == KIT_VERSION
    assert report["versions"] == {
        "polyattn": pa.__version__, "python": platform.python_version(),
        "numpy": metadata.version("numpy"), "pytest": metadata.version("pytest"),
    }  # fmt: skip
    assert report["library_version"] == metadata.version("numpy")
    assert report["platform"] == platform.platform()
    assert report["seconds"] > 0
    assert report["passed"] == len(report["rows"]) > 5
    assert {row["outcome"] for row in report["rows"]} == {"passed"}


def test_progress_is_told(softmax: tuple[Report, list[Progress]]) -> None:
    report, seen = softmax
    assert seen[0] == (0, 0, 0)
    assert all(now.total in (0, len(report.rows)) and now.done <= len(report.rows) for now in seen)
    assert seen == sorted(seen)


def test_with_several_processes_nothing_is_lost(softmax: tuple[Report, list[Progress]]) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist runs tests in several processes; it is not installed")
    seen: list[Progress] = []
    report = run_check("numpy", pytest_args=(*SOFTMAX, "-n", "2"), progress=seen.append)
    assert {row.check: row for row in report.rows} == {row.check: row for row in softmax[0].rows}
    assert {now.total for now in seen} <= {0, len(report.rows)}


@pytest.mark.parametrize(
    ("module", "library", "owner"),
    [
        ("array_api_strict", "array_api_strict", "array-api-strict"),
        ("array_api_compat.torch", "torch", "torch"),
    ],
)
def test_a_namespace_whose_arrays_a_plugin_owns(module: str, library: str, owner: str) -> None:
    pytest.importorskip(library, reason=f"this is about {library}, which is not installed")
    part = ("--ignore-glob=*/conformance/test_[!fs]*", "-k", "softmax or nothing_selected")
    report = run_check(module, namespace=True, pytest_args=part)
    assert [row for row in report.rows if row.outcome == "failed"] == []
    assert report.passed > 5
    assert (report.owner, report.namespace) == (owner, True)
    assert report.library_version == importlib.import_module(library).__version__
    assert report.left_out > 10


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise RuntimeError('no licence')", "cannot be imported here: no licence"),
        ("from numpy import asarray", "which lacks astype, matmul, reshape, sum"),
        ("asarray = astype = matmul = reshape = sum = lambda x: x", "expected an array, got list"),
        ("asarray = astype = matmul = reshape = sum = 3", "'int' object is not callable"),
    ],
)
def test_what_is_no_namespace(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, source: str, told: str) -> None:
    (tmp_path / "no_arrays.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "no_arrays", raising=False)
    with pytest.raises(UnknownBackendError, match="no_arrays") as caught:
        run_check("no_arrays", namespace=True)
    assert told in str(caught.value)
