"""The engine of ``polyattn bench`` and its command line. Nothing is timed: the clock is simulated."""

import errno
import gc
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import polyattn as pa
from polyattn import bench, registry
from polyattn.bench import Case, Memory, Report, Shape, compare, parse_shape, race
from polyattn.bench import _compare as compare_module
from polyattn.bench import _race as race_module
from polyattn.bench._contestant import Contestant, Peer
from polyattn.bench._memory import device_memory

SMALL = Shape(2, 3, 16, 16, 8)
TURN = 1e3 / 64  # milliseconds, without a rounding


def steady() -> Callable[[], float]:
    """A clock by which every measurement takes TURN."""
    ticks = itertools.count()
    return lambda: next(ticks) * TURN / 1e3


def compared(*cases: Case, **options: Any) -> Report:
    return compare(cases, **{"rounds": 1, "threads": 1, "clock": steady(), "rest": lambda: None, **options})


def fake(name: str, ran: dict[str, int], factor: float = 1.0, failure: Exception | None = None) -> Peer:
    """Return a peer with polyattn's results on NumPy times a factor, which counts its runs."""

    def contestant(case: Case, device: str, threads: int) -> Contestant:
        inputs = case.inputs()
        del inputs["dout"]
        out = pa.attention(**inputs, backend="numpy") * np.float32(factor)

        def run() -> dict[str, np.ndarray]:
            ran[name] += 1
            if failure is not None:
                raise failure
            return {"out": out}

        return Contestant(run, lambda results: results)

    return Peer(name, "numpy", contestant, scores_held=(4, 4))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Replace the peers by a correct one, two wrong ones and one that fails; return the number of runs of each."""
    ran = dict.fromkeys(("right", "wrong", "lost", "broken"), 0)
    fakes = (
        fake("right", ran),
        fake("wrong", ran, 1.001),
        fake("lost", ran, float("nan")),
        fake("broken", ran, failure=MemoryError("no room\nat all")),
    )
    monkeypatch.setattr("polyattn.bench._peers.PEERS", {peer.name: peer for peer in fakes})
    return ran


# ---- timing ------------------------------------------------------------------------------------------------------


class Track:
    """A clock that the contestants advance, and a record of their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def runner(self, name: str, *seconds: float) -> Callable[[], None]:
        takes = itertools.cycle(seconds)

        def run() -> None:
            self.ran.append(name)
            self.now += next(takes)

        return run


def test_everyone_runs_once_a_round_and_each_round_begins_with_another() -> None:
    track, turns = Track(), []
    runs = {name: track.runner(name, 0.5) for name in "abc"}
    seconds = race(runs, 4, clock=lambda: track.now, rest=lambda: turns.append("rest"), before_turn=turns.append)
    assert seconds == {name: [0.5] * 4 for name in "abc"}
    assert "".join(track.ran) == "abc" + "abc" + "bca" + "cab" + "abc"  # the first to see how long each takes
    assert turns[3:] == [x for name in "abcbcacababc" for x in (name, "rest")]


def test_a_short_run_is_repeated_until_its_turn_is_long_enough() -> None:
    track = Track()
    seconds = race({"short": track.runner("short", 0.0002)}, 3, clock=lambda: track.now, rest=lambda: None)
    assert seconds["short"] == pytest.approx([0.0002] * 3)
    untimed, seen = 300, len(track.ran)  # 60 ms of runs, before those that are timed
    timed, remainder = divmod(seen - 1 - 10 - 3 * untimed, 4)  # 1 run, 10 runs, then enough to see how long one takes
    assert remainder == 0, seen
    assert 0.010 <= timed * 0.0002 <= 0.015


def test_what_is_timed_has_run_before_unless_it_is_long() -> None:
    track = Track()
    first_is_slow = track.runner("middling", 0.1, 0.3, 0.1, 0.3, 0.1)
    assert (
        race({"middling": first_is_slow}, 2, clock=lambda: track.now, rest=lambda: None)["middling"]
        == [pytest.approx(0.1)] * 2
    )
    assert len(track.ran) == 5
    race({"long": track.runner("long", 0.75)}, 2, clock=lambda: track.now, rest=lambda: None)
    assert track.ran.count("long") == 3


def test_the_garbage_collector_rests_meanwhile_and_is_restored() -> None:
    seen = []
    assert gc.isenabled()
    race({"a": lambda: seen.append(gc.isenabled())}, 1, clock=steady(), rest=lambda: None)
    with pytest.raises(ZeroDivisionError):
        race({"a": lambda: 1 / 0}, 1, clock=steady(), rest=lambda: None)
    assert set(seen) == {False}
    assert gc.isenabled()


def test_a_turn_waits_until_the_other_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.0, 0.005, 0.005, 0.010, 0.010, 0.0101])  # a thread works through two steps of 5 ms, then sleeps
    waited: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: sum(waited), process_time=lambda: next(busy), sleep=waited.append)
    monkeypatch.setattr(race_module, "time", clock)
    race_module.quiet()
    assert len(waited) == 3
    always = itertools.count(step=0.005)
    monkeypatch.setattr(clock, "process_time", lambda: next(always))
    race_module.quiet(patience=0.1)
    assert sum(waited[3:]) == pytest.approx(0.1, abs=0.006)


def test_a_row_has_the_median_and_its_ratio_to_ours(runs: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"polyattn": [0.002, 0.9, 0.001], "right": [0.005, 0.004, 0.0041]}
    monkeypatch.setattr(compare_module, "race", lambda runs, **options: {name: times[name] for name in runs})
    found = compared(Case("attention", "forward", SMALL), backend="numpy", peers=["right", "broken"]).rows
    assert [(row.milliseconds, row.ratio) for row in found] == [
        (2.0, 1.0),
        (pytest.approx(4.1), pytest.approx(2.05)),
        (None, None),
    ]


# ---- comparing ---------------------------------------------------------------------------------------------------


def test_results_are_checked_before_anyone_is_timed(runs: dict[str, int]) -> None:
    report = compared(Case("attention", "forward", SMALL), backend="numpy", rounds=3)
    rows = {row.peer: row for row in report.rows}
    assert list(rows) == ["polyattn", "right", "wrong", "lost", "broken"]
    assert rows["polyattn"].ratio == rows["right"].ratio == 1.0
    assert runs["right"] == 1 + 1 + 3 * (4 + 1)  # checked, looked at, and in each turn warmed up and timed
    for name in ("wrong", "lost", "broken"):
        assert (rows[name].milliseconds, rows[name].ratio, runs[name]) == (None, None, 1)
    assert rows["wrong"].error == pytest.approx(1e-3, rel=0.01)
    assert rows["wrong"].note == "not timed: its results differ from polyattn's by 1.0e-03"
    assert rows["lost"].error is None
    assert rows["broken"].note == "failed: MemoryError: no room"


def test_a_reference_is_held_against_polyattn_too(runs: dict[str, int]) -> None:
    case = Case("attention", "forward", SMALL)
    off = {"out": 1.001 * pa.attention(*list(case.inputs().values())[:3], backend="numpy")}
    rows = {row.peer: row for row in compared(case, backend="numpy", reference=lambda case: off).rows}
    assert rows["wrong"].milliseconds == TURN
    assert rows["wrong"].ratio is None
    for name in ("polyattn", "right"):
        assert rows[name].note == "not timed: its results differ from the reference by 1.0e-03"


def test_a_peer_that_would_fill_the_memory_is_not_run(runs: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_module, "available_memory", lambda: 4 * SMALL.scores * 4)
    row = compared(Case("attention", "forward", SMALL), backend="numpy", peers=["right"]).rows[1]
    assert row.note.startswith("not run: its scores would take")
    assert runs["right"] == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("task", bench.TASKS)
def test_every_peer_that_is_here_agrees(task: str, causal: bool, backend: str) -> None:
    cases = [Case(task, what, SMALL, causal) for what in bench.TASKS[task]]
    report = compared(*cases, backend=backend)
    assert {row.what for row in report.rows} == set(bench.TASKS[task])
    for row in report.rows:
        absent_here = row.note.startswith("not run: it does not compute on")
        assert row.milliseconds == TURN or absent_here, row
        assert absent_here or row.error <= 1e-5, row
    doing = {name for name, peer in bench.PEERS.items() if task in peer.tasks}
    assert doing <= {row.peer for row in report.rows} | report.absent.keys()


def test_one_query_on_many_keys_agrees(backend: str) -> None:
    shape = parse_shape("2,4,1:64,8")
    assert (shape.n_q, shape.n_k, str(shape)) == (1, 64, "2,4,1:64,8")
    report = compared(*(Case("attention", what, shape) for what in ("forward", "both")), backend=backend)
    assert not [row for row in report.rows if row.note and not row.note.startswith("not run: it does not compute on")]


def test_another_dtype_is_left_to_those_who_have_it() -> None:
    report = compared(Case("attention", "forward", SMALL, dtype="float64"), backend="numpy")
    rows = {row.peer: row for row in report.rows}
    assert rows["plain-numpy"].error < 1e-14
    assert all(row.note.startswith("not run: ") for row in report.rows if row.milliseconds is None)


def test_threads_and_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_NUM_THREADS", "1")
    monkeypatch.delenv("NPROC", raising=False)
    torch = sys.modules.get("torch")

    def setting() -> list[int]:
        pools = [pool["num_threads"] for pool in threadpool_info()]
        return [*pools, torch.get_num_threads()] if torch else pools

    before, during = setting(), []

    def look() -> None:
        during.append((setting(), os.environ.get("NPROC"), os.environ.get("POLYATTN_NUM_THREADS")))

    report = compared(Case("attention", "forward", SMALL), backend="numpy", threads=3, rest=look)
    assert setting() == before
    assert (os.environ["POLYATTN_NUM_THREADS"], os.environ.get("NPROC")) == ("1", None)
    assert set(during[0][0]) <= {3}
    assert during[0][1:] == ("3", None)
    assert report.threads["numpy"] == "3, by threadpoolctl"


# ---- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set is read from /proc, which only Linux has")
def test_memory_is_that_of_the_call() -> None:
    case = Case("attention", "forward", parse_shape("1,2,1024,16"))
    scores, results = 4 * case.shape.scores, 4 * 2 * 1024 * 16
    found = bench.peak_memory("plain-numpy", case, "numpy", "cpu", 1)
    assert found.results == results
    assert scores + results < found.peak < 6 * scores  # it holds the scores, their exponentials and the weights
    assert found.beyond == found.peak - results


def test_memory_of_a_device_is_not_made_up() -> None:
    with pytest.raises(pa.PolyattnError, match="does not include the memory of cuda:0"):
        bench.peak_memory("plain-numpy", Case("attention", "forward", SMALL), "numpy", "cuda:0", 1)


def test_memory_of_a_device_is_what_its_allocators_say(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"cupy": 512, "torch": 100, "peak": 9000}

    def run() -> None:
        held["cupy"] += 4096
        held["peak"] = held["torch"] + 1000

    pool = SimpleNamespace(free_all_blocks=lambda: held.update(cupy=256), total_bytes=lambda: held["cupy"])
    cuda = SimpleNamespace(
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda: held.update(peak=held["torch"]),
        memory_allocated=lambda: held["torch"],
        max_memory_allocated=lambda: held["peak"],
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(get_default_memory_pool=lambda: pool))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert device_memory(run) == 4096 + 1000
    monkeypatch.delitem(sys.modules, "torch")
    assert device_memory(run) == 4096


# ---- the command line --------------------------------------------------------------------------------------------


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Replace the clock by the steady one, and the memory by 10 bytes for each score; record the options."""
    calls: list[dict[str, Any]] = []

    def call(cases: Any, **options: Any) -> Report:
        calls.append({"cases": cases, **options})
        return compare(cases, **{**options, "clock": steady(), "rest": lambda: None})

    monkeypatch.setattr(bench, "compare", call)
    monkeypatch.setattr(compare_module, "peak_memory", lambda peer, case, *_: Memory(10 * case.shape.scores, 0))
    return calls


def test_json_is_one_object(command: Any, backend: str, untimed: list[dict[str, Any]]) -> None:
    found = command("bench", "attention", "--shape", "1,2,16,8", "--causal", "--backend", backend, "--json").result
    assert found["machine"].keys() == {
        "processor", "architecture", "cores", "memory_gib", "system", "others"
    } | ({"device"} if found["device"].startswith("cuda") else set())  # fmt: skip
    assert found["versions"]["polyattn"] == pa.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert (found["task"], found["backend"], found["rounds"]) == ("attention", backend, 7)
    assert found["device"] == registry.ready(backend).devices()[0]
    assert {(row["peer"], row["what"]) for row in found["rows"]} >= {("polyattn", "forward"), ("polyattn", "both")}
    for row in found["rows"]:
        assert row.keys() == {
            "peer", "shape", "what", "causal", "dtype", "milliseconds", "ratio", "error", "memory_mib", "note"
        }  # fmt: skip
        assert (row["shape"], row["causal"], row["dtype"], row["memory_mib"]) == ("1,2,16,8", True, "float32", None)
        if row["peer"] == "polyattn":
            assert (row["milliseconds"], row["ratio"], row["error"]) == (TURN, 1.0, 0.0)
    assert [case.what for case in untimed[0]["cases"]] == ["forward", "both"]


def test_the_table_has_a_row_for_each_and_says_what_was_left_out(
    command: Any, untimed: list[dict[str, Any]], runs: dict[str, int]
) -> None:
    shapes = ("--shape", "2,3,16,8", "--shape", "1,2,1:32,8")
    code, out, err = command("bench", "attention", *shapes, "--what", "forward", "--backend", "numpy", "--memory")
    assert (code, err) == (0, "")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert [row[:5] for row in cells[:3]] == [
        ["2,3,16,8", "forward", "polyattn", "15.62", "1.00"],
        ["", "", "right", "15.62", "1.00"],
        ["", "", "wrong", "–", "–"],
    ]
    assert cells[5][0] == "1,2,1:32,8"
    assert "wrong on 2,3,16,8 forward: not timed: its results differ from polyattn's by 1.0e-03" in out
    assert max(len(line) for line in out.splitlines() if line[0] in "┏│└") <= 80
    assert f"numpy {np.__version__}" in out
    assert "threads: numpy" in out


def test_options_reach_the_engine(command: Any, untimed: list[dict[str, Any]]) -> None:
    command("bench", "layer", "--shape", "1,2,8,4", "--what", "both", "--peer", "torch-mha", "--rounds", 9,
            "--threads", 1, "--backend", "numpy", "--device", "cpu", "--dtype", "float64")  # fmt: skip
    (options,) = untimed
    assert options["cases"] == [Case("layer", "both", Shape(1, 2, 8, 8, 4), False, "float64")]
    chosen = {name: options[name] for name in ("backend", "device", "peers", "rounds", "threads", "memory")}
    assert chosen == {
        "backend": "numpy", "device": "cpu", "peers": ["torch-mha"], "rounds": 9, "threads": 1, "memory": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nonsense",), "nonsense"),
        (("attention", "--rounds", 6), "--rounds"),
        (("attention", "--threads", 0), "--threads"),
        (("attention", "--shape", "1,8,64"), "--shape: expected batch,heads,n,d like 1,8,2048,64"),
        (("attention", "--shape", "1,8,0,64"), "got '1,8,0,64'"),
        (("attention", "--shape", "1,8,1:64,64", "--causal"), "--shape: expected n_q = n_k with causal"),
        (("layer", "--shape", "1,8,1:64,64"), "--shape: expected n_q = n_k in layer"),
        (("attention", "--dtype", "int8"), "--dtype: expected one of float16"),
        (("train", "--what", "both"), "--what: expected step of train, got 'both'"),
        (("attention", "--peer", "torch-mha"), "--peer: expected one of plain-numpy"),
        (("attention", "--backend", "nupmy"), "Did you mean 'numpy'?"),
        (("attention", "--plot", "a.svg"), "--plot: expected a file whose name ends in .png"),
        (("attention", "--plot", "no/a.png"), "--plot: the folder 'no' does not exist"),
        (("attention", "--plot", "a.png", "--shape", "1,1,8,8", "--shape", "1,2,8,8"), "that differ in n alone"),
    ],
)
def test_bad_options_are_told(
    command: Any, arguments: tuple[Any, ...], told: str, untimed: list[dict[str, Any]]
) -> None:
    assert told in command("bench", *arguments).refused(2)


def test_a_peer_that_was_asked_for_has_to_be_there(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.PEERS, "jax", replace(bench.PEERS["jax"], library="no_such_library"))
    told = command("bench", "attention", "--peer", "jax", "--backend", "numpy").refused(1)
    assert told.endswith("peer 'jax': no_such_library is not installed: pip install \"polyattn[jax]\"")


def test_without_matplotlib_no_plot_is_begun(
    command: Any, untimed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyattn.plot._axes.importlib.util.find_spec", lambda name: None)
    told = command("bench", "attention", "--plot", "a.png").refused(1)
    assert told.endswith('plot: it needs matplotlib; install it with: pip install "polyattn[plot]"')
    assert untimed == []


def test_the_plot_shows_time_and_memory_against_n(command: Any, untimed: list[dict[str, Any]], tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason='pip install "polyattn[plot]"')
    from matplotlib.image import imread

    shapes = [x for n in (8, 16, 32) for x in ("--shape", f"1,2,{n},4")]
    command("bench", "attention", *shapes, "--backend", "numpy", "--peer", "plain-numpy", "--plot", "a.png", "--json")
    assert len(np.unique(imread(tmp_path / "a.png").reshape(-1, 4), axis=0)) > 50
    report = compare(untimed[0]["cases"], backend="numpy", peers=["plain-numpy"], rounds=1, memory=True,
                     clock=steady(), rest=lambda: None)  # fmt: skip
    from polyattn.bench._picture import picture

    panels = picture(report).get_axes()
    assert [axes.get_ylabel() for axes in panels] == ["median time (ms)", "peak memory (MiB)"] * 2
    assert {(axes.get_xscale(), axes.get_yscale(), axes.get_xlabel()) for axes in panels} == {
        ("log", "log", "sequence length n")
    }
    ours, plain = panels[1].get_lines()
    assert (ours.get_label(), plain.get_label()) == ("polyattn", "plain-numpy")
    assert list(ours.get_xdata()) == [8, 16, 32]
    assert list(ours.get_ydata()) == pytest.approx([10 * 2 * n * n / 2**20 for n in (8, 16, 32)], abs=1e-3)


def test_a_plot_that_cannot_be_written_does_not_lose_the_figures(
    command: Any, untimed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason='pip install "polyattn[plot]"')

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    outcome = command("bench", "attention", "--shape", "1,2,8,4", "--peer", "plain-numpy", "--plot", "a.png", "--json")
    assert "a.png: cannot be written: No space left on device" in outcome.refused(1)
    assert {row["peer"] for row in json.loads(outcome.out)["rows"]} == {"polyattn", "plain-numpy"}


def test_help_names_the_options(command: Any) -> None:
    out = command("bench", "--help").out
    for option in ("--shape", "--causal", "--what", "--peer", "--rounds", "--threads", "--plot", "--json"):
        assert option in out
