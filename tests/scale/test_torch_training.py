"""Training with torch.distributed: torch's wrappers of layers, ``polyattn train``, and processes that are killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import polyattn as pa
from polyattn.checkpoint import read_tensors
from polyattn.training._processes import Processes

pytest.importorskip("torch", reason='torch joins the processes: pip install "polyattn[torch]"')

SMALL = ("--batch", "6", "--sequence", "4", "--width", "4", "--json", "--checkpoint-every", "10")


def test_a_killed_process_ends_the_others(found):
    """Each of the others is told by an EngineError, long before the timeout of the group, 30 s."""
    lost = found("torch_lost", OMP_NUM_THREADS="1")
    assert lost["ends"] == [0, 0, -signal.SIGKILL, 0]
    assert len(lost["told"]) == 3
    for message, seconds in lost["told"]:
        assert "another process of the group ended or did not answer" in message
        assert "start again from the last checkpoint" in message
        assert seconds < 30


@pytest.fixture(scope="module")
def layers(found):
    return found("torch_layers", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_layers_under_ddp_and_fsdp(layers, backend):
    """Two processes with half of each batch, or with half of each parameter as well, train as one process does."""
    assert layers[f"ddp {backend}"] <= 1e-12
    assert layers[f"fsdp {backend}"] <= 1e-12
    assert layers[f"sharded {backend}"] == layers["parameters"]


def test_a_distributed_checkpoint(layers):
    assert layers["read by two"]
    assert layers["read by one"]


def start(folder, steps, *more, processes=2, folders=()):
    """Start ``polyattn train`` in some processes with the variables of torchrun, and return them.

    All of them have one folder, or each one of ``folders``.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "polyattn", "train", "--steps", str(steps), *SMALL, *more, "--output"]
    shared = {**os.environ, "WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(processes)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    places = folders or [folder] * processes
    return [
        subprocess.Popen([*command, str(place)], env=environment, **pipes)
        for place, environment in zip(places, own, strict=True)
    ]


def ended(processes):
    """Wait, and return what the first process printed."""
    results = [process.communicate(timeout=120) for process in processes]
    for process, (_, err) in zip(processes, results, strict=True):
        assert process.returncode == 0, err
    assert [out for out, _ in results[1:]] == [""] * (len(processes) - 1)  # only the first one reports
    return json.loads(results[0][0])


def content(folder):
    return read_tensors(folder / "checkpoint.safetensors")


def test_processes_train_as_one_and_a_killed_run_goes_on(tmp_path):
    whole, killed, other = tmp_path / "whole", tmp_path / "killed", tmp_path / "other"
    processes = start(killed, 100_000)
    deadline = time.monotonic() + 90
    while not (killed / "checkpoint.safetensors").exists() or int(content(killed)[1]["step"]) < 10:
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.02)
    processes[1].kill()
    _, err = processes[0].communicate(timeout=60)
    processes[1].communicate()
    assert processes[0].returncode == 1
    assert "another process of the group ended or did not answer" in " ".join(err.split())
    kept = int(content(killed)[1]["step"])
    assert kept >= 10

    other.mkdir()
    for path in killed.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    steps = kept + 30
    ended(start(killed, steps, "--resume"))
    result = ended(start(whole, steps))
    a, b = content(killed)[0], content(whole)[0]
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)  # bit for bit

    alone = ended(start(tmp_path / "alone", steps, processes=1))
    assert result["loss"] == pytest.approx(alone["loss"], rel=1e-3)
    ended(start(other, steps, "--resume", processes=3))
    c = content(other)[0]
    for name in ("q_proj.weight", "v_proj.weight", "out_proj.weight"):
        np.testing.assert_allclose(c[name], a[name], rtol=1e-3, atol=1e-4)


def test_a_second_run_on_the_folder_is_refused(tmp_path):
    first = start(tmp_path / "run", 100_000)
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "run" / "checkpoint.safetensors").exists():
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.02)
        second = start(tmp_path / "run", 100_000, "--resume")
        errors = [" ".join(process.communicate(timeout=120)[1].split()) for process in second]
        assert f"run is in use by process {first[0].pid} on " in errors[0]
        assert "another process of the group ended" in errors[1]
        assert [process.returncode for process in second] == [2, 1]
        assert [process.poll() for process in first] == [None, None]
    finally:
        for process in first:
            process.kill()
            process.communicate()


def test_processes_that_read_different_checkpoints_are_told(tmp_path):
    for folder, steps in ((tmp_path / "a", 2), (tmp_path / "b", 3)):
        ended(start(folder, steps, processes=1))
    run = start(tmp_path / "a", 9, "--resume", folders=(tmp_path / "a", tmp_path / "b"))
    for process in run:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "--resume: the processes read checkpoints of different steps, 2, 3 by rank" in " ".join(err.split())
    assert int(content(tmp_path / "a")[1]["step"]) == 2


def test_more_processes_than_samples():
    with pytest.raises(pa.ArgumentError, match="--batch: expected at least one sample for each of 3 processes, got 2"):
        Processes(0, 3).expect_samples(2)


def test_the_shares_of_a_batch():
    """Together they are the batch, once; a process without a sample computes one that does not count."""
    x = np.arange(5)
    shares = [Processes(rank, 3).share((x, x)) for rank in range(3)]
    np.testing.assert_array_equal(np.concatenate([pair[0] for pair, _ in shares]), x)
    assert [part for _, part in shares] == [1 / 5, 2 / 5, 2 / 5]
    few = [Processes(rank, 3).share((x[:2], x[:2])) for rank in range(3)]
    assert [(len(pair[0]), part) for pair, part in few] == [(1, 0.0), (1, 0.5), (1, 0.5)]
