"""Calls in less and less memory than they need: ``python out_of_memory.py BACKEND COUNT SEED``.

The limit is that of the system on the memory of a process (RLIMIT_AS), at random between nothing and what a call needs.
Each call gives its result or an exception; afterwards everything is whole, and small and large calls are right. Prints
how many calls had no memory, and how many had enough.
"""

import gc
import json
import re
import resource
import sys
from pathlib import Path

import numpy as np
from whole import equal, shared

import polyattn as pa

NAME, COUNT, SEED = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(SEED)
# What the libraries raise: torch and JAX have exceptions of their own, with the number of bytes.
WORDS = r"allocate \d[\d,.]* ?\w*|buffer of \d+ bytes|[Oo]ut of memory allocating \d+ bytes"


def arrays(*shape, count=1):
    """Return arrays of the backend's library."""
    made = [pa.to_backend(rng.standard_normal(shape).astype(np.float32), NAME) for _ in range(count)]
    return made if count > 1 else made[0]


def attention(*shape, **arguments):
    q, k, v = arrays(*shape, count=3)

    def call():
        out, cache = pa.attention_forward(q, k, v, causal=True, **arguments)
        return out, *pa.attention_backward(out, cache)[:3]

    return call


def layer():
    block = pa.TransformerBlock(64, num_heads=4, hidden=1024, backend=NAME)
    x = arrays(4, 512, 64)

    def call():
        y, cache = block.forward(x, causal=True)
        return block.backward(y, cache)

    return call


def update():
    optimiser = pa.optim.AdamW(1e-3)
    params, grads = {"a": arrays(1000, 1000)}, {"a": arrays(1000, 1000)}
    state = optimiser.init(params)
    return lambda: optimiser.update(grads, state, params)


def append():
    k = arrays(1, 4, 512, 64)

    def call():
        cache = pa.SlidingKVCache.create(1, 4, 600, 64, backend=NAME).append(k, k).append(k, k)
        return cache.attention(k[:, :, :1, :])

    return call


def in_use():
    """Return the bytes of addresses that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def without_memory(call, limit):
    """Call within a limit of additional bytes; return whether there was no memory, or the result."""
    gc.collect()
    resource.setrlimit(resource.RLIMIT_AS, (in_use() + limit, resource.RLIM_INFINITY))
    try:
        return call(), None
    except (MemoryError, pa.PolyattnError, RuntimeError) as error:
        failure = error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    text = str(failure)
    # Python's own MemoryError, for one of its objects, has no text.
    assert re.search(WORDS, text) or (isinstance(failure, MemoryError) and not text), repr(failure)
    return None, failure


def main():
    calls = [attention(1, 8, 1024, 64)]
    if NAME != "jax":  # it compiles each operation
        calls += [attention(1, 8, 1024, 64, softcap=3.0), layer(), update(), append()]
    small = attention(2, 2, 8, 4)
    wants, want = [call() for call in calls], small()
    before, failed = shared(), 0
    for i in range(COUNT):
        number = int(rng.integers(len(calls)))
        result, failure = without_memory(calls[number], int(10 ** rng.uniform(3, 7)))
        failed += failure is not None
        assert result is None or equal(result, wants[number])
        del result, failure
        assert equal(small(), want), f"call {i} of seed {SEED}: the next small call"
        assert equal(calls[number](), wants[number]), f"call {i} of seed {SEED}: the next large call"
        assert shared() == before, f"call {i} of seed {SEED} left {shared()}, before it was {before}"
    print(json.dumps([failed, COUNT - failed]))


main()
