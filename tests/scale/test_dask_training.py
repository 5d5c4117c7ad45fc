"""``polyattn train --engine dask``: the workers compute the gradients of each batch."""

import json
import subprocess
import sys

import numpy as np
import pytest

SETTINGS = ("--steps", "6", "--batch", "7", "--dtype", "float64", "--json")


def train(*options):
    command = [sys.executable, "-m", "polyattn", "train", *SETTINGS, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_its_losses_are_those_of_one_process(tmp_path):
    losses = {}
    for name, options in {"one": (), "dask": ("--engine", "dask", "--workers", 2)}.items():
        done = train("--output", tmp_path / name, *options)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
        assert ("2 workers of Dask" in done.stderr) == (name == "dask")
    assert len(losses["dask"]) == 6
    np.testing.assert_allclose(losses["dask"], losses["one"], rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", 2), "name the engine, too"),
        (("--engine", "ray"), "--engine: expected dask, got 'ray'"),
        (("--engine", "dask", "--workers", 0), "--workers: expected at least 1, got 0"),
        (("--engine", "dask", "--workers", 9), "at least one sample for each of 9 workers, got 7"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    done = train("--output", tmp_path / "run", *options)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split()).replace("│ ", "")
