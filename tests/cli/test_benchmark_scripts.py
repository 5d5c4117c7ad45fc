"""The scripts in benchmarks/: their evaluation of reports. Nothing is timed: the clock is simulated."""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polyattn.bench import Case, Memory, Report, Row, compare, parse_shape

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a script with its folder first in the path, as Python runs it."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load(name: str) -> ModuleType:
        for module in ("_common", "ceilings", "figures", "page", "targets"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return __import__(name)

    return load


def report(task: str, what: str, peer: str, milliseconds: dict[str, tuple[float, float | None]]) -> Report:
    """Return a report of a peer with these times, ours first, by shape."""
    rows = []
    for shape, (ours, theirs) in milliseconds.items():
        case = Case(task, what, parse_shape(shape))
        rows.append(Row.of(case, "polyattn", milliseconds=ours, ratio=1.0, error=0.0))
        found = {"note": "failed: MemoryError: no"} if theirs is None else {"ratio": theirs / ours}
        rows.append(Row.of(case, peer, milliseconds=theirs, **found))
    machine = {"processor": "P", "architecture": "x", "cores": 2, "memory_gib": 8.0, "system": "S", "others": 0.01}
    return Report(task, "numpy", "cpu", 7, {"numpy": "2"}, machine, {"numpy": "2.4"}, {}, tuple(rows))


def test_a_figure_is_the_median_of_the_ratios(script: Any) -> None:
    targets = script("targets")
    target = targets.TARGETS["numpy-torch-forward"]
    times = {"1,8,2048,64": (2.0, 1.8), "4,8,512,64": (2.0, 1.0), "1,8,4096,64": (2.0, 4.0)}
    found = targets.outcome(target, report("attention", "forward", "torch-sdpa", times))
    assert (found.measured, found.worst, found.worst_shape, found.reached) == (0.9, 0.5, "4,8,512,64", False)
    assert "≥ 1.2" in targets.line(found)
    assert "0.90" in targets.line(found)
    assert "MISSED" in targets.line(found)
    assert targets.outcome(target._replace(least=0.9), report("attention", "forward", "torch-sdpa", times)).reached


def test_a_target_for_each_shape_is_judged_by_the_worst(script: Any) -> None:
    targets = script("targets")
    target = targets.TARGETS["numpy-onnx-mha-forward"]
    times = {"1,8,2048,64": (2.0, 3.0), "4,8,512,64": (2.0, 1.9), "1,8,4096,64": (2.0, 4.0)}
    found = targets.outcome(target, report("attention", "forward", "onnx-mha", times))
    assert (found.measured, found.worst, found.reached) == (1.5, 0.95, False)
    assert "≥ 1 each" in targets.line(found)


def test_the_overhead_is_a_difference(script: Any) -> None:
    targets = script("targets")
    target = targets.TARGETS["numpy-overhead"]
    found = targets.outcome(target, report("attention", "forward", "plain-numpy", {"1,1,4,8": (0.075, 0.0125)}))
    assert found.measured == pytest.approx(62.5)
    assert not found.reached


def test_a_peer_that_was_not_timed_leaves_the_figure_unmeasured(script: Any) -> None:
    targets = script("targets")
    target = targets.TARGETS["numpy-jax-both"]
    found = targets.outcome(target, report("attention", "both", "jax", {"1,8,2048,64": (2.0, None)}))
    assert (found.measured, found.reached) == (None, False)
    assert "not measured: 1,8,2048,64: failed: MemoryError: no" in targets.line(found)


def test_the_table_of_figures_is_measured_by_the_engine(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    targets = script("targets")
    ticks = itertools.count()

    def steady(cases: Any, **options: Any) -> Report:
        small = [replace(case, shape=parse_shape("1,1,4,8")) for case in cases]
        return compare(small, **{**options, "clock": lambda: next(ticks) / 64, "rest": lambda: None})

    monkeypatch.setattr(targets, "compare", steady)
    assert targets.main(["numpy-overhead", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["name"], row["measured"], row["reached"]) == ("numpy-overhead", 0.0, True)
    assert targets.main(["numpy-plain-forward"]) == 1
    assert "1.00" in capsys.readouterr().out


def test_memory_is_held_against_its_bounds(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = script("targets")
    mib = 2**20
    at = {8192: Memory(20 * mib, 16 * mib), 16384: Memory(90 * mib, 32 * mib)}
    memory = targets.memory
    monkeypatch.setattr(targets, "memory", lambda t, n: memory(t, n, lambda peer, case, *_: at[case.shape.n_k]))
    forward, both = (targets.TARGETS[f"memory-numpy-{what}"] for what in ("forward", "both"))
    found, _ = targets.measured(forward, 7, 1)
    assert (found.measured, found.reached, found.notes) == (58.0, False, ("growth from n/2 4.50 (at most 2.2)",))
    assert "≤ 64 MiB" in targets.line(found)
    at[8192] = Memory(45 * mib, 16 * mib)
    assert targets.measured(forward, 7, 1)[0].reached
    assert targets.measured(both, 7, 1)[0].measured == 58.0 - 0.5  # less the log-sum-exp
    at[16384] = Memory(97 * mib, 32 * mib)
    assert not targets.measured(forward, 7, 1)[0].reached


def test_a_ceiling_is_the_peer_against_the_bare_products(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ceilings = script("ceilings")

    def three(runs: Any, rounds: int) -> dict[str, list[float]]:
        for run in runs.values():
            run()
        return dict(zip(runs, ([6e-3] * rounds, [4e-3] * rounds, [3e-3] * rounds), strict=True))

    monkeypatch.setattr(ceilings, "race", three)
    monkeypatch.setattr(ceilings, "LONG", (parse_shape("1,2,512,8"),))
    monkeypatch.setattr(ceilings, "DECODE", (parse_shape("1,2,1:16,8"),))
    assert ceilings.main() == 0
    _, both, one_query = capsys.readouterr().out.splitlines()
    operations = 7 * 2 * (2 * 512 * 512) * 8
    assert both.split()[-3:] == ["1.50", "2.00", f"{operations / 3e-3 / 1e9:.0f}"]
    assert one_query.split()[-3:-1] == ["1.50", "2.00"]


def test_the_page_has_the_figures_between_its_marks(script: Any, tmp_path: Path) -> None:
    page = script("page")
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.count(page.BEGIN) == text.count(page.END) == 1
    copy = tmp_path / "page.md"
    copy.write_text("before\n" + page.BEGIN + "old\n" + page.END + "after\n", encoding="utf-8")
    times = {"1,8,2048,64": (2.0, 1.6), "4,8,512,64": (2.0, 150.0), "1,8,4096,64": (2.0, None)}
    found = report("attention", "forward", "torch-sdpa", times).to_dict()
    (tmp_path / "attention-numpy-forward.json").write_text(json.dumps(found), encoding="utf-8")
    for _ in range(2):  # it may be written again
        assert page.main([str(tmp_path), "--page", str(copy)]) == 0
        written = copy.read_text(encoding="utf-8")
        assert written.startswith("before\n" + page.BEGIN)
        assert written.endswith(page.END + "after\n")
    assert "old" not in written
    assert "| `1,8,2048,64` | 2 | 1.6 (**0.80**) |" in written
    assert "| `4,8,512,64` | 2 | 150 (75.00) |" in written
    assert "| `1,8,4096,64` | 2 | failed |" in written
    assert "- torch-sdpa on 1 of 2 in *attention-numpy-forward*, by at most 1.25 times" in written
    assert "Machine: P (x), 2 cores, 8.0 GiB, S." in written


def test_a_folder_without_figures_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        script("page").main([str(tmp_path)])
