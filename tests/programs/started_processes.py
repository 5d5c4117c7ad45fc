"""Processes of multiprocessing, by spawn or forkserver: ``python started_processes.py METHOD COUNT BACKEND…``.

Each has layers that were pickled, selects a backend of its own, and returns the bits of the parent.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np

import polyattn as pa


def computed(name, layer, x):
    """Return what is selected in the process, and the bits of a layer and of attention on a backend."""
    outside = pa.get_backend()
    with pa.use_backend(name):
        y, cache = layer.forward(x, causal=True)
        out = pa.attention(y, y, y)
    assert cache.place.backend.name == layer.backend
    return os.getpid(), outside, y.tobytes(), out.tobytes()


def main():
    method, count, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["polyattn"])
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((count, 2, 5, 8)).astype(np.float32)
    tasks = [(name, pa.MultiHeadAttention(8, 2, backend=name), x) for x in xs for name in names]
    wants = [computed(*task)[2:] for task in tasks]
    with ProcessPoolExecutor(2, mp_context=context) as pool, pa.use_backend("numpy"):
        pa.set_backend("array-api-strict")  # for this process, not for those that it starts
        found = list(pool.map(computed, *zip(*tasks, strict=True)))
    assert [bits[2:] for bits in found] == wants
    assert {outside for _, outside, *_ in found} == {None}
    assert os.getpid() not in {process for process, *_ in found}
    print(len(found))


if __name__ == "__main__":
    main()
