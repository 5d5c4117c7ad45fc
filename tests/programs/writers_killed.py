"""Write versions of a file and of a model in several files, one over the other, in processes that are killed.

``python writers_killed.py FOLDER HOW KILLS SEED``, where HOW is ``moment`` or ``line`` as in ``train_killed.py``. After
each kill both are read: a version that was announced as written is there, or the one that was being written.
Prints a JSON object with the numbers of kills and of versions.
"""

import json
import signal
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from killing import Lines, ended, forked, killed_after

from polyattn.checkpoint import read_tensors, write_shards, write_tensors

MOST = 20  # versions of one process


def tensors(version):
    """Return the content of a version, which is not always of one size."""
    return {"x": np.full(1000 + version % 7, float(version)), "y": np.full((3, 5), version), "z": np.zeros(0)}


def write(folder, announced, first):
    """Write versions from ``first`` on, and announce each after it is written."""
    with open(announced, "a") as stream:
        for version in range(first, first + MOST):
            write_tensors(folder / "one.safetensors", tensors(version), {"version": str(version)})
            write_shards(
                folder / "many.safetensors.index.json", tensors(version), {"version": str(version)}, shard_size=500
            )
            print(version, file=stream, flush=True)


def found(path):
    """Return the version of a file, whose content is that of the version."""
    arrays, metadata = read_tensors(path)
    version = int(metadata["version"])
    expected = tensors(version)
    assert arrays.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(arrays[name], x, strict=True)
    return version


def main(folder, how, kills, seed):
    """Kill until there are enough kills."""
    rng, done, versions, first = np.random.default_rng(seed), 0, 0, 0
    announced = folder / "announced"
    write_tensors(folder / "one.safetensors", tensors(0))  # loads what the processes need
    lines, began = Lines(), time.perf_counter()
    count = [lines.kill_at(0)] if how == "line" else []
    assert ended(forked(partial(write, folder, announced, 0), *count, output=folder / "out")) == 0
    seconds, most = time.perf_counter() - began, lines.count
    while done < kills:
        before = int(announced.read_text().split()[-1])
        first = before + 1
        start = partial(write, folder, announced, first)
        if how == "moment":
            code = killed_after(forked(start, output=folder / "out"), rng.uniform(0, seconds))
        else:
            code = ended(forked(start, Lines().kill_at(int(rng.integers(1, most))), folder / "out"))
        assert code in (0, -signal.SIGKILL), (code, (folder / "out").read_text())
        done += code != 0
        last = int(announced.read_text().split()[-1])
        versions += last - before
        one, many = found(folder / "one.safetensors"), found(folder / "many.safetensors.index.json")
        assert last <= one <= last + 1, (last, one)
        assert last <= many <= one, (last, many, one)
    print(json.dumps({"kills": done, "versions": versions}))


if __name__ == "__main__":
    place, manner, number, start_seed = sys.argv[1:]
    main(Path(place), manner, int(number), int(start_seed))
