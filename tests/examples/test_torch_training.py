"""The examples of training with torch: what they train learns, however it is run, and two processes are as one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason='the examples train with torch: pip install "polyattn[torch]"')

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: on arrays this small several threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(*arguments: str) -> str:
    found = subprocess.run(
        [sys.executable, *arguments], cwd=EXAMPLES, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--autocast", "--checkpoint"], ["--backend", "numpy"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_it_learns(example: ModuleType, arguments: list[str]) -> None:
    assert example.main([*arguments, "--steps", "60"]) > 0.98


def test_workers_and_the_compiler(example: ModuleType) -> None:
    """A worker that starts afresh makes the same rows, and the compiled model takes the steps of the other one."""
    steps = ["--steps", "20"]
    out = run("torch_training.py", *steps, "--compile", "aot_eager", "--workers", "1", "--start", "spawn")
    (right,) = re.findall(r"([\d.]+)% of the digits right", out)
    assert float(right) == pytest.approx(100 * example.main(steps), abs=0.5)


def test_two_processes_learn_what_one_does() -> None:
    out = run("torch_ddp.py")
    (difference,) = re.findall(r"2 processes and one differ by (\S+) after 10 steps", out)
    assert float(difference) < 2e-6
