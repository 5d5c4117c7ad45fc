"""Attention with a million keys on Dask: more than the memory of its workers, which may die meanwhile.

    python examples/million_keys.py                                # 1,048,576 keys, one head, forward and backward
    python examples/million_keys.py --heads 8 --dtype float32      # eight heads
    python examples/million_keys.py --kill forward --kill backward # a worker is killed in each
    python examples/million_keys.py --keep --memory-limit 700MiB   # workers that must write to disk

Keys, values and their gradients are in chunks: the workers make the inputs when they need them, and write the gradients
to files; with --keep the inputs stay with the workers, which write to disk what their memory cannot hold. The same
problem is then computed in one process, and compared.
"""

import argparse
import os
import resource
import signal
import tempfile
import threading
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, progress

import polyattn as pa
from polyattn.distributed import dask as over_dask

FEATURES = 64


def main(arguments: list[str] | None = None) -> float:
    options = parsed(arguments)
    folder = Path(tempfile.mkdtemp(prefix="million-keys-", dir=options.folder))
    settings = {"distributed.worker.memory.terminate": False, "logging.distributed": "error"}
    with (
        dask.config.set(settings),
        LocalCluster(
            n_workers=options.workers, threads_per_worker=1, memory_limit=options.memory_limit,
            dashboard_address=":0", local_directory=folder,
        ) as cluster,
        Client(cluster) as client,
    ):  # fmt: skip
        began = time.perf_counter()
        out, dq, files = over_the_cluster(client, options, folder)
        seconds = time.perf_counter() - began
        peaks = client.run(peak_memory)
        spilled = sum(client.run(spilled_bytes).values())
    print(
        f"Dask, {options.workers} workers: {seconds:.1f} s, peak memory {max(peaks.values()) / 2**20:.0f} MiB a worker"
    )
    print(f"written to disk, because a worker had too little memory: {spilled / 2**20:.0f} MiB")
    began = time.perf_counter()
    want, grads = in_one_process(options)
    print(f"one process: {time.perf_counter() - began:.1f} s")
    pairs = {"out": (out, want), "dq": (dq, grads.q), "dk": (files["dk"], grads.k), "dv": (files["dv"], grads.v)}
    errors = {name: largest_error(*pair) for name, pair in pairs.items()}
    print("largest difference: " + ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    for path in folder.glob("d*.npy"):
        path.unlink()
    return max(errors.values())


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=2**20)
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=2**15, help="keys in a chunk")
    parser.add_argument("--dtype", default="float64", choices=["float32", "float64"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-limit", default="900MiB", help="of a worker, which spills to disk near it")
    parser.add_argument("--keep", action="store_true", help="keep the inputs on the workers")
    parser.add_argument("--kill", action="append", default=[], choices=["forward", "backward"])
    parser.add_argument("--folder", help="for the gradients and what workers spill")
    return parser.parse_args(arguments)


def inputs(options: argparse.Namespace) -> list[da.Array]:
    """Return q, k, v and the gradient of the result: random numbers that depend on their position only."""
    rng = da.random.default_rng(0)
    lengths = {"q": options.queries, "k": options.keys, "v": options.keys, "dout": options.queries}
    return [
        rng.standard_normal(
            (options.heads, n, FEATURES), chunks=(1, options.chunk if n == options.keys else -1, -1)
        ).astype(options.dtype)
        for n in lengths.values()
    ]


def over_the_cluster(client, options, folder):
    q, k, v, dout = client.persist(inputs(options)) if options.keep else inputs(options)
    out, cache = over_dask.attention_forward(q, k, v)
    with Victim(client, "forward" in options.kill, "attention-part"):
        out, *_ = persisted(client, "forward", out, *cache.row_statistics)
    # The backward needs the result of the forward and its statistics, but not its tasks.
    over_dask.keep([cache.saved.out, *cache.saved.statistics])
    grads = over_dask.attention_backward(dout, cache)
    files = {"dk": File(folder / "dk.npy", k), "dv": File(folder / "dv.npy", v)}
    stored = da.store([grads.k, grads.v], [*files.values()], lock=False, compute=False)
    with Victim(client, "backward" in options.kill, "attention-d"):
        dq, *_ = persisted(client, "backward", grads.q, *stored)
    return out.compute(), dq.compute(), {name: file.array("r") for name, file in files.items()}


def persisted(client, what, *lazy):
    """Compute together, and show the progress."""
    done = client.persist(list(lazy))
    print(what, flush=True)
    progress(done, notebook=False)
    print()
    return done


class Victim:
    """Kills a worker with SIGKILL in the middle of a computation: when it has results of that name."""

    def __init__(self, client, wanted, results):
        self.client, self.results = client, results
        self.thread = threading.Thread(target=self.kill) if wanted else None

    def __enter__(self):
        if self.thread is not None:
            self.thread.start()

    def __exit__(self, *_):
        if self.thread is not None:
            self.thread.join(timeout=60)

    def kill(self):
        while True:
            for address, keys in self.client.has_what().items():
                lost = [key for key in keys if self.results in str(key)]
                if lost:
                    pid = self.client.run(os.getpid, workers=[address])[address]
                    os.kill(pid, signal.SIGKILL)
                    print(f"\nkilled worker {pid}, which had {len(lost)} results", flush=True)
                    return
            time.sleep(0.02)


class File:
    """An array in a file, into which workers write chunks."""

    def __init__(self, path, like):
        self.path, self.shape, self.dtype = path, like.shape, like.dtype
        np.lib.format.open_memmap(path, "w+", self.dtype, self.shape)

    def array(self, mode):
        return np.lib.format.open_memmap(self.path, mode)

    def __setitem__(self, where, chunk):
        array = self.array("r+")
        array[where] = chunk
        array.flush()


def in_one_process(options):
    q, k, v, dout = dask.compute(*inputs(options), scheduler="threads")
    out, cache = pa.attention_forward(q, k, v)
    return out, pa.attention_backward(dout, cache)


def largest_error(got, want) -> float:
    step = 2**16
    return max(
        float(np.max(np.abs(got[:, i : i + step] - want[:, i : i + step]))) for i in range(0, want.shape[1], step)
    )


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def spilled_bytes(dask_worker) -> int:
    return getattr(dask_worker.data, "cumulative_metrics", {}).get(("disk-write", "bytes"), 0)


if __name__ == "__main__":
    main()
