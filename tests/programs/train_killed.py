"""Train in processes that are killed and resumed until the run is done, and compare it with a run that was not killed.

``python train_killed.py FOLDER HOW KILLS SEED BACKEND``, where HOW is

- ``moment``: killed from outside, at a random moment of the time that the run takes;
- ``line``: killed at a random line of the modules that write files;
- ``byte``: ended by the system at a random byte of a file.

Prints a JSON object with the numbers of kills and of runs, and of kills before each kind of state.
"""

import collections
import json
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from killing import Lines, at_byte, ended, forked, killed_after

import polyattn as pa
from polyattn.checkpoint import read_tensors
from polyattn.cli import run

TIMES = ("seconds", "steps_per_second", "resumed_from", "output")
CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"


def main(folder, how, kills, seed, backend):
    """Kill until there are enough kills and the last run is done."""
    rng, counts, runs = np.random.default_rng(seed), collections.Counter(), 0
    sys.modules["matplotlib"] = None  # pictures take longer than these runs
    for name in {"numpy", backend}:
        pa.MultiHeadAttention(4, 2, backend=name)  # loads the library
    os.environ["POLYATTN_BACKEND"] = backend
    np.savez(folder / "data.npz", X=rng.standard_normal((10, 4, 4)), Y=rng.standard_normal((10, 4, 4)))
    while counts.total() < kills:
        settings, stages = chosen(rng, folder)
        for name in ("whole", "killed"):
            shutil.rmtree(folder / name, ignore_errors=True)
        limits = unkilled(folder, how, stages[-1], settings)
        if rng.random() < 0.3:  # an earlier run that is replaced
            expect_end(forked(partial(train, folder / "killed", 3, ("--seed", "9")), output=folder / "out"), folder)
        for steps in stages:
            start = partial(train, folder / "killed", steps, settings)
            counts += killed_until_done(folder, partial(killed, how, limits, rng), start, int(settings[1]))
        expect_same(folder)
        runs += 1
    print(json.dumps({"kills": counts.total(), "runs": runs, "states": counts}))


def chosen(rng, folder):
    """Return the options of a run, and the steps at which it ends and is continued."""
    steps = int(rng.integers(6, 30))
    settings = ["--seed", str(rng.integers(10, 1000)), "--checkpoint-every", str(rng.integers(1, 9))]
    settings += ["--dtype", str(rng.choice(["float32", "float64"]))]
    if rng.random() < 0.2:
        settings += ["--data", str(folder / "data.npz")]
    return settings, [steps // 2, steps] if rng.random() < 0.3 else [steps]


def train(output, steps, settings, how=()):
    """Run ``polyattn train`` in this process."""
    shape = [] if "--data" in settings else ["--sequence", "4", "--width", "4"]
    fixed = ["--batch", "4", "--json", *shape]
    return run(["train", "--steps", str(steps), "--output", str(output), *fixed, *settings, *how])


class Limits(NamedTuple):
    """The seconds, the lines of the WRITERS and the bytes of the largest file of a run that nobody kills."""

    seconds: float
    lines: int
    bytes: int


def unkilled(folder, how, steps, settings):
    """Train the run with which the killed one is compared; lines are counted if they matter, which takes time."""
    lines, began = Lines(), time.perf_counter()
    start = partial(train, folder / "whole", steps, settings)
    count = [lines.kill_at(0)] if how == "line" else []
    expect_end(forked(start, *count, output=folder / "wanted"), folder)
    seconds = time.perf_counter() - began
    return Limits(seconds, lines.count, max(path.stat().st_size for path in (folder / "whole").iterdir()))


def killed(how, limits, rng, start, output, kills):
    """Call ``start`` in a process, kill it at random, later after more ``kills``, and return its exit code."""
    if how == "moment":  # where the machine has become slower, the run must end nevertheless
        return killed_after(forked(start, output=output), rng.uniform(0, limits.seconds * (1 + kills / 10)))
    if how == "line":
        return ended(forked(start, Lines().kill_at(int(rng.integers(1, limits.lines))), output))
    return ended(forked(start, at_byte(int(rng.integers(1, limits.bytes * 1.2))), output))


def killed_until_done(folder, kill, start, seed):
    """Start, kill and resume until the run has its steps; return the number of kills by the state that they left."""
    counts = collections.Counter()
    while True:
        before = state(folder / "killed")
        options = [] if before is None else ["--resume"] if before["seed"] == seed else ["--overwrite"]
        code = kill(partial(start, options), folder / "out", counts.total())
        if code == 0:
            return counts
        assert code in (-signal.SIGKILL, -signal.SIGXFSZ), (code, (folder / "out").read_text())
        counts[expect_nothing_lost(folder / "killed", before, seed)] += 1


def state(folder):
    """Return the seed and the step of a run's checkpoint, None before the first; it and its metrics must be whole."""
    if not (folder / CHECKPOINT).exists():
        return None
    _, metadata = read_tensors(folder / CHECKPOINT)
    step = int(metadata["step"])
    logged = lines(folder)
    assert [line["step"] for line in logged if line["step"] <= step] == list(range(1, step + 1)), (step, logged)
    return {"seed": json.loads(metadata["config"])["seed"], "step": step}


def lines(folder):
    """Return the whole lines of the metrics."""
    if not (folder / METRICS).exists():
        return []
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines(True) if line.endswith("\n")]


def expect_nothing_lost(folder, before, seed):
    """Compare with the state before the kill; return the state in words."""
    after = state(folder)
    left = ", a temporary file" if list(folder.glob(".polyattn-*.tmp")) else ""
    if after is None:
        assert before is None
        return f"no checkpoint{left}"
    if before is not None and before["seed"] == after["seed"]:
        assert after["step"] >= before["step"]
    return ("a checkpoint" if after["seed"] == seed else "the earlier run") + left


def expect_same(folder):
    """Compare the killed run with the one that was not killed, bit for bit."""
    killed, whole = folder / "killed", folder / "whole"
    assert {path.name for path in killed.iterdir()} == {CHECKPOINT, METRICS}, list(killed.iterdir())
    (tensors, metadata), (expected, wanted) = read_tensors(killed / CHECKPOINT), read_tensors(whole / CHECKPOINT)
    assert metadata == wanted
    assert {name: x.tobytes() for name, x in tensors.items()} == {name: x.tobytes() for name, x in expected.items()}
    assert (killed / METRICS).read_bytes() == (whole / METRICS).read_bytes()
    results = [json.loads((folder / name).read_text().splitlines()[-1]) for name in ("out", "wanted")]
    found, expected_result = ({key: x for key, x in result.items() if key not in TIMES} for result in results)
    assert found == expected_result


def expect_end(process, folder):
    """Wait for a process that nobody kills."""
    assert ended(process) == 0, [(folder / name).read_text() for name in ("out", "wanted") if (folder / name).exists()]


if __name__ == "__main__":
    place, manner, number, start_seed, library = sys.argv[1:]
    main(Path(place), manner, int(number), int(start_seed), library)
