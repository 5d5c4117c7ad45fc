"""Attention and training on worker processes, of which one is killed with SIGKILL in each part."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyattn as pa
from polyattn.distributed import dask as over_dask

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def run(found):
    return found("dask_workers")


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_worker_that_dies_changes_no_number(run, part):
    assert run["attention"][part]["killed"]
    assert run["attention"][part]["error"] < 1e-12


def test_no_step_of_a_training_counts_twice(run):
    assert run["training"]["killed"]
    assert run["training"]["steps"] == 6
    assert run["training"]["error"] < 1e-8


def test_a_dead_scheduler_is_named(run):
    assert run["dead"].startswith("EngineError: the scheduler of the current distributed.Client is gone")
    assert "close the client" in run["dead"]


def test_gradients_need_a_client():
    x = np.ones((4, 3))
    with pytest.raises(pa.EngineError, match=r"client = distributed.Client\(\)"):
        over_dask.mean_gradients(lambda params, x, y: (x.sum(), {}), {}, x, x)


def test_million_keys_in_a_small_size(tmp_path):
    """The example: keys in chunks, a worker killed in each direction, gradients in files."""
    small = ["--keys", "16384", "--queries", "128", "--chunk", "2048", "--kill", "forward", "--kill", "backward"]
    command = [sys.executable, EXAMPLES / "million_keys.py", *small, "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    errors = [float(pair.split()[-1]) for pair in done.stdout.splitlines()[-1].partition(": ")[2].split(", ")]
    assert len(errors) == 4
    assert max(errors) < 1e-11
    assert done.stdout.count("killed worker") == 2
