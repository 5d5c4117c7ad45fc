"""polyattn, and libraries by name, that 64 threads use first at once: ``python first_used.py NAME…``.

Thread i imports polyattn and computes with the library i modulo their number. Each result has the bits that one thread
gets afterwards.
"""

import sys

from at_once import run_at_once

NAMES, COUNT = sys.argv[1:], 64
results = {}


def used(i):
    import numpy as np

    import polyattn as pa

    x = np.random.default_rng(i).standard_normal((2, 5, 4)).astype(np.float32)
    with pa.use_backend(NAMES[i % len(NAMES)]):
        layer = pa.Projection(4, 4, seed=i)
        y, cache = pa.attention_forward(layer(x), x, x, causal=True)
        grads = pa.attention_backward(y, cache)
    assert cache.place.backend.name == layer.backend == NAMES[i % len(NAMES)]
    assert type(y) is np.ndarray
    return [np.asarray(array).tobytes() for array in (y, *grads[:3])]


def work(i):
    results[i] = used(i)


run_at_once(work, COUNT)
assert all(used(i) == results[i] for i in range(COUNT))
