"""Threads and asyncio tasks.

64 threads, and as many tasks, select backends, compute and decode at once; each gets the bits that one thread gets.
"""

import asyncio
import contextlib

import numpy as np
import pytest
from at_once import run_at_once

import polyattn as pa

BACKENDS = ("numpy", "torch", "jax", "array-api-strict")
THREADS, INPUTS = 64, 8
OUTCOME = "each its own selection, the bits of one thread"


def bits(*arrays):
    return [np.asarray(pa.to_backend(x, "numpy")).tobytes() for x in arrays]


def choice(rng):
    """Return a backend, and its device or none."""
    return str(rng.choice(BACKENDS)), [None, "cpu"][int(rng.integers(2))]


def selected():
    """Return the selection in force, as what was chosen."""
    found = pa.get_backend()
    return found and (found.backend, found.device)


# ---- selection ----


def nest(rng, depth=4):
    """Enter scopes in scopes; each is the selection inside it, also after those within, and not after an exception."""
    mine = choice(rng)
    with contextlib.suppress(ZeroDivisionError), pa.use_backend(*mine):
        assert selected() == mine
        if depth:
            nest(rng, depth - 1)
        assert selected() == mine
        if rng.integers(2):
            raise ZeroDivisionError


def test_scopes_in_threads(amount, tried):
    """Scopes belong to a thread, whatever the others select."""
    times = amount(3, 200)

    def work(i):
        rng = np.random.default_rng(i)
        for _ in range(times):
            nest(rng)
            assert selected() is None

    run_at_once(work, THREADS)
    tried("scopes in 64 threads", THREADS * times * 5, "the innermost one of the thread is in force")


def test_the_default_in_threads(amount, tried):
    """Half of the threads set the default: all see one of those that were set, its backend with its device."""
    times = amount(50, 2000)
    allowed = {None, *((name, device) for name in BACKENDS for device in (None, "cpu"))}

    def work(i):
        rng = np.random.default_rng(i)
        for _ in range(times):
            if i % 2:
                pa.set_backend(*(choice(rng) if rng.integers(3) else (None,)))
            assert selected() in allowed
            mine = choice(rng)
            with pa.use_backend(*mine):
                assert selected() == mine

    try:
        run_at_once(work, THREADS)
    finally:
        pa.set_backend(None)
    tried("changes of the default by 64 threads", THREADS // 2 * times, "one that was set; scopes take precedence")


# ---- computing ----


CACHES = {pa.KVCache: {"capacity": 8}, pa.PagedKVCache: {"pages": 4, "page_size": 2}, pa.SlidingKVCache: {"window": 3}}


def decoded(kind, name, x):
    """Return attention of each step of decoding with a cache."""
    cache = kind.create(batch=1, kv_heads=2, head_dim=4, backend=name, **CACHES[kind])
    results = []
    for step in range(x.shape[2]):
        new = x[:, :, step : step + 1, :]
        cache = cache.append(new, new)
        results.append(cache.attention(new))
    return results


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_and_caches(name, amount, tried, rng):
    """64 threads share a layer and its compiled programs; each has its caches, account and input."""
    times = amount(1, 2) if name == "array-api-strict" else amount(1, 10)
    layer = pa.MultiHeadAttention(16, 2, backend=name)
    optimiser = pa.optim.AdamW(1e-3)
    xs = rng.standard_normal((INPUTS, 2, 9, 16)).astype(np.float32)
    heads = rng.standard_normal((INPUTS, 1, 2, 5, 4)).astype(np.float32)
    kinds = tuple(CACHES)[: amount(1 if name == "jax" else 3, 3)]  # XLA compiles each
    params = layer.parameters()

    def computed(i):
        with pa.transfers() as account:
            y, cache = layer.forward(xs[i], causal=True)
            inputs, grads = layer.backward(y, cache)
            new, state = optimiser.update(grads, optimiser.init(params), params)
            steps = decoded(kinds[i % len(kinds)], name, heads[i])
        return [bits(y, *inputs[:1], *grads.values(), *new.values(), *state.values(), *steps), account.count]

    wants = [computed(i) for i in range(INPUTS)]

    def work(i):
        for _ in range(times):
            assert computed(i % INPUTS) == wants[i % INPUTS]

    run_at_once(work, THREADS)
    assert bits(*layer.parameters().values()) == bits(*params.values())
    tried(f"layers, optimisers and caches in 64 threads on {name}", THREADS * times, OUTCOME)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_the_pool(name, amount, tried, rng, monkeypatch):
    """Problems for the threads of the native library, from 64 threads at once: one has the pool, others go alone."""
    monkeypatch.setattr("polyattn_native._kernel.threads_of", lambda problem: 2)
    times = amount(2, 60)
    arrays = [pa.to_backend(x, name) for x in rng.standard_normal((4, 1, 4, 200, 16)).astype(np.float32)]

    def computed(i):
        x = arrays[i % 4]
        out, cache = pa.attention_forward(x, x, x, causal=i % 8 > 3)
        return bits(out, *pa.attention_backward(out, cache)[:3])

    wants = [computed(i) for i in range(8)]

    def work(i):
        for _ in range(times):
            assert computed(i % 8) == wants[i % 8]

    run_at_once(work, THREADS)
    tried(f"problems for the pool from 64 threads on {name}", THREADS * times, OUTCOME)


# ---- asyncio ----


def test_tasks(amount, tried, rng):
    """Tasks with a backend each take turns at every step; what they start in a thread has their selection too."""
    times = amount(3, 60)
    xs = rng.standard_normal((THREADS, 2, 5, 4)).astype(np.float32)

    def computed(i):
        with pa.transfers() as account:
            out, cache = pa.attention_forward(xs[i], xs[i], xs[i], causal=True)
            grads = pa.attention_backward(out, cache)
        return cache.place.backend.name, bits(out, *grads[:3]), account.count

    wants = []
    for i in range(THREADS):
        with pa.use_backend(BACKENDS[i % 4]):
            wants.append(computed(i))
    assert {name for name, _, _ in wants} == set(BACKENDS)

    async def task(i):
        mine = BACKENDS[i % 4], None if i % 3 else "cpu"
        for _ in range(times):
            assert selected() is None
            with pa.use_backend(*mine):
                await asyncio.sleep(0)
                assert computed(i) == wants[i]
                with pa.use_backend(BACKENDS[(i + 1) % 4]):
                    await asyncio.sleep(0)
                    assert selected() == (BACKENDS[(i + 1) % 4], None)
                assert await asyncio.to_thread(selected) == mine
                assert await asyncio.create_task(child(mine)) is None
                assert selected() == mine

    async def child(mine):
        """Begin with the selection of the task that started this one, and change only its own."""
        assert selected() == mine
        with pa.use_backend("numpy"):
            await asyncio.sleep(0)
            assert selected() == ("numpy", None)

    async def main():
        await asyncio.gather(*map(task, range(THREADS)))

    asyncio.run(main())
    assert selected() is None
    tried("asyncio tasks with different backends", THREADS * times, OUTCOME)


# ---- first use ----


def test_first_use(program, amount, tried):
    """In a fresh process 64 threads import polyattn at once, and then all libraries, or one."""
    for names in [BACKENDS, *((name,) for name in BACKENDS)][: amount(1, 5)]:
        times = amount(1, 8)
        for _ in range(times):
            program("first_used", *names)
        tried(f"first uses of {', '.join(names)} by 64 threads of a process", times, "the bits of one thread")
