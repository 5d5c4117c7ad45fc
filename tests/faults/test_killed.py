"""Processes that are killed.

A run that was killed and resumed, as often as it takes, is bit for bit the run that was not killed: its parameters, the
state of its optimiser, its metrics and its result. A checkpoint is at each moment that of one step, whole.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from polyattn.checkpoint import read_tensors

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked from one, to start fast")

SAME = "resumed: bit for bit the run that was not killed"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def killing(program, tmp_path, rng):
    """Run a program that kills processes, and return what it counted."""

    def call(name, *arguments, backend=()):
        seed = int(rng.integers(2**31))
        return json.loads(
            program(name, tmp_path, *map(str, arguments), str(seed), *backend, timeout=1800, **ONE_THREAD)
        )

    return call


@pytest.mark.parametrize(("how", "what"), [
    ("moment", "kill -9 at a random moment of a training"),
    ("line", "kill -9 at a random line of what writes its files"),
    ("byte", "a training that the system ends at a random byte of a file"),
])  # fmt: skip
def test_a_training_that_is_killed(killing, amount, tried, how, what):
    counted = killing("train_killed", how, amount(6, 500), backend=("numpy",))
    assert counted["kills"] >= amount(6, 500)
    tried(f"{what}, numpy", counted["kills"], f"{counted['runs']} runs, {SAME}")


def test_a_training_on_another_library_that_is_killed(killing, amount, tried):
    """In the long form on torch, whose import takes seconds."""
    library = amount("array-api-strict", "torch")
    pytest.importorskip(library.replace("-", "_"), reason=f"{library} is not installed")
    counted = killing("train_killed", "moment", amount(2, 100), backend=(library,))
    tried(f"kill -9 at a random moment of a training, {library}", counted["kills"], f"{counted['runs']} runs, {SAME}")


@pytest.mark.parametrize(("how", "what"), [("moment", "moment"), ("line", "line of their code")])
def test_writers_that_are_killed(killing, amount, tried, how, what):
    counted = killing("writers_killed", how, amount(10, 500))
    tried(
        f"kill -9 of writers of a checkpoint and of a model in several files, at a random {what}",
        counted["kills"],
        f"{counted['versions']:,} versions: the last announced one, or the next one, is whole",
    )


def content(folder):
    """Return the files of a run: the tensors and metadata of its checkpoint, the bytes of the others."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    tensors, metadata = read_tensors(folder / "checkpoint.safetensors")
    arrays = {name: (x.dtype.name, x.shape, x.tobytes()) for name, x in tensors.items()}
    return {**found, "checkpoint.safetensors": (arrays, metadata)}


def test_the_command_that_is_killed(tmp_path, amount, rng, tried):
    """The whole command, with its imports and its pictures, in processes of their own."""
    options = ["--steps", "400", "--checkpoint-every", "20", "--batch", "8", "--json"]

    def start(name, *more):
        command = [sys.executable, "-m", "polyattn", "train", *options, "--output", name, *more]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **ONE_THREAD}, **quiet)

    began = time.monotonic()
    assert start("whole").wait() == 0
    seconds, whole, kills, runs = time.monotonic() - began, content(tmp_path / "whole"), 0, 0
    while kills < amount(1, 25):
        code = None
        while code != 0:
            resumed = (tmp_path / "killed" / "checkpoint.safetensors").exists()
            process = start("killed", *(["--resume"] if resumed else []))
            time.sleep(rng.uniform(0.3, 1.0) * seconds)
            process.send_signal(signal.SIGKILL)
            code = process.wait()
            assert code in (0, -signal.SIGKILL)
            kills += code != 0
        assert content(tmp_path / "killed") == whole
        shutil.rmtree(tmp_path / "killed")
        runs += 1
    tried("kill -9 of the whole command, with imports and pictures", kills, f"{runs} runs, {SAME}")
