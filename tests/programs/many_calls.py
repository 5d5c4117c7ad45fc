"""Small calls, many of them: ``python many_calls.py BACKEND COUNT``. Prints how many, and what grew meanwhile.

A round has attention with its backward, row operations, a selection, and a step of decoding. On JAX most calls are
those of compiled functions, as in a training; on array-api-strict, which checks every argument, most are row operations
and selections.
"""

import gc
import itertools
import json
import sys
import threading
from pathlib import Path

import numpy as np

import polyattn as pa
from polyattn._resident import resident

NAME, COUNT = sys.argv[1], int(sys.argv[2])
q, k, v = (pa.to_backend(x, NAME) for x in np.random.default_rng(0).standard_normal((3, 1, 2, 4, 4)).astype(np.float32))
host = np.ones((2, 3), np.float32)


def attended():
    out, cache = pa.attention_forward(q, k, v, causal=True)
    pa.attention_backward(out, cache)


def rows():
    pa.functional.softmax(q)
    y, cache = pa.functional.layer_norm_forward(q)
    pa.functional.layer_norm_backward(y, cache)


def selections():
    with pa.use_backend(NAME), pa.transfers() as account:
        pa.functional.relu(host)
    assert account.count == (2 if NAME != "numpy" else 0)


class Decoding:
    """A cache that is appended to, and begun again when it is full."""

    def __init__(self):
        self.cache = self.empty()

    def empty(self):
        return pa.KVCache.create(1, 2, 32, 4, backend=NAME)

    def step(self):
        if self.cache.position == 32:
            self.cache = self.empty()
        self.cache = self.cache.append(k[:, :, :1, :], v[:, :, :1, :])
        self.cache.attention(q[:, :, :1, :])


def mixed(plain):
    """Return the functions that make the calls of a round, each with its number of calls of polyattn."""
    if NAME == "array-api-strict":
        return [*plain, *[(lambda: pa.functional.softmax(q), 1), (selections, 1)] * 20]
    if NAME != "jax":
        return plain
    import jax

    both = jax.jit(lambda q, k, v: jax.value_and_grad(lambda q: pa.attention(q, k, v, causal=True).sum())(q))
    norm = jax.jit(lambda x: pa.functional.layer_norm(pa.functional.softmax(x)))
    return [*[(lambda: both(q, k, v), 1), (lambda: norm(q), 1)] * 100, *plain]


def measured():
    """Return what must not grow."""
    gc.collect()
    return {
        "bytes": resident("VmRSS"),
        "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "system threads": len(list(Path("/proc/self/task").iterdir())),
        "file descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def run(functions, count):
    """Make as many calls, and return how many."""
    calls, done = itertools.cycle(functions), 0
    while done < count:
        call, number = next(calls)
        call()
        done += number
    return done


plain = [(attended, 2), (rows, 3), (selections, 1), (Decoding().step, 2)]
functions = mixed(plain)
run(plain, 600)  # more than two sequences of decoding
run(functions, COUNT // 10)
before = measured()
done = run(functions, COUNT)
after = measured()
print(json.dumps({"calls": done, **{name: after[name] - before[name] for name in after}}))
