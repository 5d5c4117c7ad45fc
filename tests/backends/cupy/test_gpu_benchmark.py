"""``benchmarks/gpu.py`` without a GPU: it says so, and its arithmetic is right, with NumPy in CuPy's place."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polyattn.bench import PEERS, Case, Row, Shape, compare
from polyattn.testing import assert_close
from polyattn.testing import references as ref

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module that measures NumPy on the host."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    for module in ("_common", "gpu"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    gpu = importlib.import_module("gpu")
    for name, value in {"DEVICE": "cpu", "LIBRARY": "numpy", "missing": lambda: None}.items():
        monkeypatch.setattr(gpu, name, value)
    aims = ((16, "ratio", 1e-6), (32, "µs", 0.0))
    numpy = gpu.Comparison("numpy", "numpy", "numpy", "plain-numpy", (16, 32), aims)
    monkeypatch.setattr(gpu, "COMPARISONS", (numpy,))
    monkeypatch.setattr(gpu, "cases", lambda lengths, longest: [
        Case("attention", what, Shape(1, 2, n, n, 8), n == 16) for n in lengths if n <= longest
        for what in ("forward", "both")
    ])  # fmt: skip
    monkeypatch.setattr(gpu, "compare", lambda *given, **options: compare(*given, **{**options, "memory": False}))
    return gpu


def test_without_a_device():
    done = subprocess.run(
        [sys.executable, SCRIPT], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("benchmarks/gpu.py: nothing to measure: ")
    assert "cupy" in done.stderr


@pytest.mark.parametrize("causal", [False, True])
def test_reference(gpu, causal):
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((2, n, 4)) for n in (5, 7, 7, 5))
    got = gpu.reference(np, q, k, v, dout, causal=causal, backward=True, block=2)
    assert_close(got["out"], ref.attention(q, k, v, causal=causal).out)
    slopes = ref.attention_gradients(dout, q, k, v, causal=causal)
    for name in ("q", "k", "v"):
        assert_close(got[f"d{name}"], getattr(slopes, name))


def test_every_row_is_printed_and_written(gpu, tmp_path, capsys):
    path = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(path), "--rounds", "1", "--longest", "16"]) == 0
    found = json.loads(path.read_text())
    assert [(row["peer"], row["what"]) for row in found["rows"]] == [
        (peer, what) for what in ("forward", "both") for peer in ("polyattn", "plain-numpy")
    ]
    for row in found["rows"]:
        assert (row["comparison"], row["shape"], row["causal"], row["note"]) == ("numpy", "1,2,16,8", True, "")
        assert 0 < row["error"] < 1e-5
        assert row["milliseconds"] > 0
        assert row["target"] == ("ratio 1e-06: reached" if row["peer"] == "polyattn" else "")
    assert found["versions"]["numpy"] == np.__version__
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 5
    assert out[-1] == "4 rows; of polyattn's, 0 are wrong or failed"


def test_a_wrong_result_is_an_error(gpu, monkeypatch, capsys):
    right = gpu.reference
    monkeypatch.setattr(gpu, "reference", lambda *x, **o: {name: y + 1 for name, y in right(*x, **o).items()})
    assert gpu.main(["--rounds", "1", "--longest", "16"]) == 1
    out = capsys.readouterr().out
    assert "not timed: its results differ from the reference by" in out
    assert "of polyattn's, 2 are wrong or failed" in out


def test_a_contestant_that_fails_is_left_out(gpu, monkeypatch, capsys):
    def fail(*arguments):
        raise MemoryError("8 GiB")

    monkeypatch.setitem(PEERS, "plain-numpy", replace(PEERS["plain-numpy"], contestant=fail))
    assert gpu.main(["--rounds", "1", "--longest", "16"]) == 0
    assert "failed: MemoryError: 8 GiB" in capsys.readouterr().out


def test_the_cases_of_a_comparison(gpu):
    gpu = importlib.reload(gpu)
    for comparison in gpu.COMPARISONS:
        found = list(gpu.cases(comparison.lengths, 4096))
        assert {case.shape.n_q for case in found} == {n for n in comparison.lengths if n <= 4096}
        assert {case.shape.n_q for case in found if case.causal} == {4096}
        assert len(found) == 4 * (len({case.shape.n_q for case in found}) + 1)


@pytest.mark.parametrize(
    ("comparison", "n", "milliseconds", "peer", "verdict"),
    [
        ("cupy", 1024, 1.0, 9.0, ""),
        ("cupy", 4096, 1.0, 2.5, "ratio 2.5: reached"),
        ("cupy", 4096, 1.0, 2.4, "ratio 2.5: missed"),
        ("torch", 16384, 1.04, 1.0, "ratio 0.952: reached"),
        ("torch", 16384, 1.06, 1.0, "ratio 0.952: missed"),
        ("torch", 128, 0.10, 0.05, "60 µs more: reached"),
        ("torch", 128, 0.12, 0.05, "60 µs more: missed"),
        ("torch", 128, None, 0.05, ""),
    ],
)
def test_verdicts(gpu, comparison, n, milliseconds, peer, verdict):
    gpu = importlib.reload(gpu)
    case = Case("attention", "forward", Shape(1, 8, n, n, 64))
    ours, theirs = (Row.of(case, name, milliseconds=x) for name, x in (("polyattn", milliseconds), ("peer", peer)))
    comparison = next(c for c in gpu.COMPARISONS if c.name == comparison)
    assert gpu.verdict(comparison, n, ours, theirs) == verdict
