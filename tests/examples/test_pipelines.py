"""The pipeline of SciPy, attention and scikit-learn, as a user runs it: what goes in comes out, and it reads digits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the pipeline is scikit-learn's: pip install scikit-learn")

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "pipelines.py"
KINDS = {"numpy": "numpy.ndarray", "torch": "torch.Tensor", "array-api-strict": "array_api_strict._array_object.Array"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, since SciPy may be imported here without its array API."""
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def expect(done: subprocess.CompletedProcess[str], kind: str, moved: int) -> None:
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{kind} in, {kind} out; {moved} arrays moved for attention"
    accuracy, sure = map(float, re.findall(r"\d\.\d{4}", second))
    assert 0.98 < accuracy < sure < 1.0


def test_one_library_from_end_to_end(backend: str) -> None:
    if backend not in KINDS:
        pytest.skip(f"scikit-learn's array API does not take the arrays of {backend}")
    expect(run("--arrays", backend), KINDS[backend], moved=0)


def test_attention_computed_by_another_library(backend: str) -> None:
    """In each of five folds queries, keys and values go over, and the result comes back."""
    arrays = "array-api-strict" if backend == "numpy" else "numpy"
    expect(run("--arrays", arrays, "--backend", backend), KINDS[arrays], moved=20)
