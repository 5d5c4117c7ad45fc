"""Attention and training on worker processes, of which one is killed with SIGKILL in each part."""

import re
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


@pytest.fixture
def example(tmp_path):
    """Return what runs the example with these options, and returns what it prints and the largest differences."""

    def run(*options):
        command = [sys.executable, EXAMPLES / "million_keys.py", *options, "--folder", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        pairs = done.stdout.splitlines()[-1].partition(": ")[2].split(", ")
        return done.stdout, [float(pair.split()[-1]) for pair in pairs]

    return run


def test_million_keys_in_a_small_size(example):
    """The example: keys in chunks, a worker killed in each direction, gradients in files."""
    small = ("--keys", "16384", "--queries", "128", "--chunk", "2048")
    printed, errors = example(*small, "--kill", "forward", "--kill", "backward")
    assert len(errors) == 4
    assert max(errors) < 1e-11
    assert printed.count("killed worker") == 2


def test_workers_with_too_little_memory_write_to_disk(example):
    """The inputs, 128 MiB, and their gradients stay on two workers whose own code takes half of their 240 MiB."""
    small = ("--keys", "131072", "--queries", "64", "--chunk", "8192")
    printed, errors = example(*small, "--keep", "--memory-limit", "240MiB")
    written = int(re.search(r"written to disk.*: (\d+) MiB", printed)[1])
    assert written > 20
    assert max(errors) < 1e-11
