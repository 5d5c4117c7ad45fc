"""The cache on torch, which it writes in place, and on JAX, where one compiled step serves every position."""

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import references as ref

RNG = np.random.default_rng(6)
HEADS, KV_HEADS, N, D = 4, 2, 6, 16
Q = RNG.standard_normal((2, HEADS, N, D)).astype(np.float32)
K, V = (RNG.standard_normal((2, KV_HEADS, N, D)).astype(np.float32) for _ in range(2))


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


def test_torch_differentiates_through_it():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    cache = pa.KVCache.create(2, KV_HEADS, 8, D, backend="torch", dtype="float64")
    q, k, v = (torch.tensor(x.astype(np.float64), requires_grad=True) for x in (Q, K, V))
    for start, stop in ((0, 4), (4, 6)):
        cache = cache.append(k[:, :, start:stop], v[:, :, start:stop])
    cache.attention(q).sum().backward()
    want = ref.attention_gradients(np.ones(Q.shape), Q, K, V, causal=True)
    for x, expected in ((q, want.q), (k, want.k), (v, want.v)):
        np.testing.assert_allclose(x.grad.numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("batch", [1, 2])
def test_jax_compiles_one_step_for_every_position(batch):
    """Donated, the memory is where it was, and to write into it takes no other."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    traces = []

    def step(cache, q, k, v):
        traces.append(cache)
        q = pa.functional.rotary_embedding(q, offset=cache.position)
        cache = cache.append(pa.functional.rotary_embedding(k, offset=cache.position), v)
        return cache.attention(q), cache

    compiled = jax.jit(step, donate_argnums=0)
    cache = pa.KVCache.create(batch, KV_HEADS, 4096, D, backend="jax")
    size, addresses = cache.keys.nbytes, [x.unsafe_buffer_pointer() for x in (cache.keys, cache.values)]
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
    append = jax.jit(lambda cache, k, v: cache.append(k, v), donate_argnums=0).lower(cache, *arrays[1:]).compile()
    assert append.memory_analysis().temp_size_in_bytes < size // 100
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
