"""``benchmarks/gpu.py`` without a GPU: it says so, and its arithmetic is right, with NumPy in CuPy's place."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from polyattn.bench import Case, Shape
from polyattn.testing import assert_close
from polyattn.testing import references as ref

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_gpu", SCRIPT)
COMPARISON = {"name": "cupy", "ours": {"numpy": ("numpy", "numpy")}, "peer": "plain-numpy"}


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module that measures NumPy on the host, and no memory."""
    gpu = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(gpu)
    for name, value in {"DEVICE": "cpu", "LIBRARY": "numpy", "memory_of": lambda run: 0.0}.items():
        monkeypatch.setattr(gpu, name, value)
    yield gpu
    del sys.modules[SPEC.name]


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


@pytest.mark.parametrize("what", ["forward", "both"])
def test_compare(gpu, what):
    case = Case("attention", what, Shape(1, 2, 16, 16, 8), True)
    rows = gpu.compare(COMPARISON, case, 1)
    assert [row.contestant for row in rows] == ["plain-numpy", "numpy"]
    for row in rows:
        assert row.error < 1e-5
        assert row.milliseconds > 0
        assert (row.note, row.target) == ("", "")
    assert rows[1].ratio == pytest.approx(rows[0].milliseconds / rows[1].milliseconds)
    assert all(str(case.shape) in gpu.line(row) for row in rows)


def test_a_wrong_result_is_called_so(gpu, monkeypatch):
    right = gpu.ours
    monkeypatch.setattr(gpu, "ours", lambda *arguments: (right(*arguments)[0], lambda results: {"out": np.zeros(1)}))
    (_, row) = gpu.compare(COMPARISON, Case("attention", "forward", Shape(1, 2, 16, 16, 8)), 1)
    assert row.note == "wrong"
    assert math.isnan(gpu.difference({"out": np.array([np.nan])}, {"out": np.ones(1)}))


def test_a_contestant_that_fails_is_left_out(gpu, monkeypatch):
    def fail(*arguments):
        raise MemoryError("8 GiB")

    monkeypatch.setattr(gpu, "ours", lambda *arguments: (fail, None))
    peer, row = gpu.compare(COMPARISON, Case("attention", "forward", Shape(1, 2, 16, 16, 8)), 1)
    assert row.note == "failed: MemoryError: 8 GiB"
    assert (row.milliseconds, row.ratio) == (None, None)
    assert peer.milliseconds > 0


@pytest.mark.parametrize(
    ("comparison", "n", "milliseconds", "peer", "verdict"),
    [
        ("cupy", 1024, 1.0, 9.0, ""),
        ("cupy", 4096, 1.0, 2.5, "2.5 x: reached"),
        ("cupy", 4096, 1.0, 2.4, "2.5 x: missed"),
        ("torch", 16384, 1.04, 1.0, "within 5 %: reached"),
        ("torch", 16384, 1.06, 1.0, "within 5 %: missed"),
        ("torch", 128, 0.10, 0.05, "60 us: reached"),
        ("torch", 128, 0.12, 0.05, "60 us: missed"),
    ],
)
def test_verdicts(gpu, comparison, n, milliseconds, peer, verdict):
    row = gpu.Row(comparison, "ours", "", "forward", False, "float32", milliseconds, peer / milliseconds)
    assert gpu.verdict(row, n, peer) == verdict
