"""The cache on torch, which it writes in place, and on JAX, where one compiled step serves every position."""

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import references as ref

RNG = np.random.default_rng(6)
HEADS, KV_HEADS, N, D = 4, 2, 6, 16
Q = RNG.standard_normal((2, HEADS, N, D)).astype(np.float32)
K, V = (RNG.standard_normal((2, KV_HEADS, N, D)).astype(np.float32) for _ in range(2))
KEYS = 4096
KINDS = {
    "fixed": lambda batch, room, **where: pa.KVCache.create(batch, KV_HEADS, room, D, **where),
    "paged": lambda batch, room, **where: pa.PagedKVCache.create(batch, KV_HEADS, batch * room // 4, 4, D, **where),
    "sliding": lambda batch, room, **where: pa.SlidingKVCache.create(batch, KV_HEADS, room, D, chunk=2, **where),
}


def full(backend, kind, batch=1):
    """Return a cache that holds 4096 positions of each entry."""
    if kind == "paged":
        cache = pa.PagedKVCache.create(batch, KV_HEADS, batch * (KEYS // 64 + 1), 64, D, backend=backend)
    else:
        cache = KINDS[kind](batch, KEYS + 8, backend=backend)
    x = np.random.default_rng(9).standard_normal((batch, KV_HEADS, KEYS, D)).astype(np.float32)
    return cache.append(x, x)


def test_torch_writes_in_place():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cache = pa.KVCache.create(2, KV_HEADS, 4096, D, backend="torch")
    addresses = cache.keys.data_ptr(), cache.values.data_ptr()
    for i in range(N):
        q, k, v = (torch.from_numpy(x[:, :, i : i + 1].copy()) for x in (Q, K, V))
        cache = cache.append(k, v)
        out = cache.attention(q)
        want = ref.attention(Q[:, :, i : i + 1], K[:, :, : i + 1], V[:, :, : i + 1]).out
        np.testing.assert_allclose(out.numpy(), want, atol=1e-6)
    cache = cache.rewind(torch.tensor([0, 2])).append(k, v)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == addresses
    assert cache.lengths.tolist() == [7, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_torch_copies_nothing_at_4096_keys(kind):
    """Every byte that a step takes from torch's allocator, freed again or not, is less than half of the keys."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cache, (q, k, v) = full("torch", kind), (torch.ones(1, heads, 1, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    addresses, size = (cache.keys.data_ptr(), cache.values.data_ptr()), cache.keys.nbytes
    cache = cache.append(k, v)
    cache.attention(q)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        cache = cache.append(k, v)
        cache.attention(q)
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in profile.events())
    assert 0 < taken < size // 2
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == addresses
    assert cache.position == KEYS + 2


@pytest.mark.parametrize("kind", KINDS)
def test_torch_differentiates_through_it(kind):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cache = KINDS[kind](2, 8, backend="torch", dtype="float64")
    q, k, v = (torch.tensor(x.astype(np.float64), requires_grad=True) for x in (Q, K, V))
    for start, stop in ((0, 4), (4, 6)):
        cache = cache.append(k[:, :, start:stop], v[:, :, start:stop])
    cache.attention(q).sum().backward()
    want = ref.attention_gradients(np.ones(Q.shape), Q, K, V, causal=True)
    for x, expected in ((q, want.q), (k, want.k), (v, want.v)):
        np.testing.assert_allclose(x.grad.numpy(), expected, atol=1e-10)


def test_torch_differentiates_through_pages_read_in_groups(monkeypatch):
    """Sinks and a bias too; the last group begins before its turn, and what it has twice counts once."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("polyattn.kv_cache._paged.NUMBERS", 2 * HEADS * N * 2 * D)
    cache = pa.PagedKVCache.create(2, KV_HEADS, 10, 2, D, backend="torch", dtype="float64")
    rng = np.random.default_rng(7)
    bias, sinks = rng.standard_normal((HEADS, N, 20)), rng.standard_normal(HEADS)
    q, k, v, b, s = (torch.tensor(x.astype(np.float64), requires_grad=True) for x in (Q, K, V, bias, sinks))
    spare = torch.zeros(2, KV_HEADS, 3, D, dtype=torch.float64)
    cache = cache.append(k, v).append(spare, spare).rewind(torch.tensor([3, 3]))
    cache.attention(q, bias=b, sinks=s).sum().backward()
    want = ref.attention_gradients(np.ones(Q.shape), Q, K, V, causal=True, bias=bias[..., :N], sinks=sinks)
    for x, expected in ((q, want.q), (k, want.k), (v, want.v), (s, want.sinks)):
        np.testing.assert_allclose(x.grad.numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(b.grad.numpy()[..., :N], want.bias, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 2])
def test_jax_decodes_4096_keys_in_place(kind, batch):
    """One compilation for every position, memory that stays where it is, and no room for a copy of the keys."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    traces = []

    def step(cache, q, k, v):
        traces.append(cache)
        cache = cache.append(k, v)
        return cache.attention(q), cache

    cache = full("jax", kind, batch)
    arrays = [jax.numpy.ones((batch, heads, 1, D), jax.numpy.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    compiled = jax.jit(step, donate_argnums=0)
    needs = compiled.lower(cache, *arrays).compile().memory_analysis()
    size, addresses = cache.keys.nbytes, [x.unsafe_buffer_pointer() for x in (cache.keys, cache.values)]
    assert needs.alias_size_in_bytes >= 2 * size
    assert needs.temp_size_in_bytes < size * (0.75 if kind == "paged" else 0.5)
    for _ in range(3):
        _, cache = compiled(cache, *arrays)
        assert [x.unsafe_buffer_pointer() for x in (cache.keys, cache.values)] == addresses
    assert len(traces) == 1
    assert cache.position == KEYS + 3


@pytest.mark.parametrize("batch", [1, 2])
def test_jax_compiles_one_step_for_every_position(batch):
    """Donated, the memory is where it was."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    traces = []

    def step(cache, q, k, v):
        traces.append(cache)
        q = pa.functional.rotary_embedding(q, offset=cache.position)
        cache = cache.append(pa.functional.rotary_embedding(k, offset=cache.position), v)
        return cache.attention(q), cache

    compiled = jax.jit(step, donate_argnums=0)
    cache = pa.KVCache.create(batch, KV_HEADS, 4096, D, backend="jax")
    addresses = [x.unsafe_buffer_pointer() for x in (cache.keys, cache.values)]
    q, k = ref.rotary_embedding(Q[:batch]), ref.rotary_embedding(K[:batch])
    for i in range(N):
        cache_before = cache
        arrays = [jax.numpy.asarray(x[:batch, :, i : i + 1]) for x in (Q, K, V)]
        out, cache = compiled(cache, *arrays)
        want = ref.attention(q[:, :, i : i + 1], k[:, :, : i + 1], V[:batch, :, : i + 1]).out
        np.testing.assert_allclose(out, want, atol=1e-6)
        assert cache_before.keys.is_deleted()
        assert [x.unsafe_buffer_pointer() for x in (cache.keys, cache.values)] == addresses
    assert len(traces) == 1
    assert cache.position == N


def test_jax_s_caches_stay_what_they_were():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    empty = pa.KVCache.create(2, KV_HEADS, 8, D, backend="jax")
    k, v = jax.numpy.asarray(K), jax.numpy.asarray(V)
    one, other = empty.append(k, v), empty.append(-k, v)
    assert (empty.position, one.position) == (0, N)
    np.testing.assert_array_equal(one.k, -other.k)


def test_jax_overflow_in_a_compiled_step_is_found_afterwards():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    compiled = jax.jit(lambda cache, k, v: cache.append(k, v))
    k, v = jax.numpy.asarray(K[:, :, :1]), jax.numpy.asarray(V[:, :, :1])
    cache = pa.KVCache.create(2, KV_HEADS, 1, D, backend="jax")
    for _ in range(2):
        cache = compiled(cache, k, v)
    with pytest.raises(pa.ArgumentError, match="holds 2 of 1"):
        cache.append(k, v)
