"""The cache on JAX, where one compiled step serves every position."""

import jax
import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import references as ref

RNG = np.random.default_rng(6)
HEADS, KV_HEADS, N, D, KEYS = 4, 2, 6, 16, 4096
Q = RNG.standard_normal((2, HEADS, N, D)).astype(np.float32)
K, V = (RNG.standard_normal((2, KV_HEADS, N, D)).astype(np.float32) for _ in range(2))


@pytest.mark.parametrize("batch", [1, 2])
def test_jax_decodes_4096_keys_in_place(full, kind, batch):
    """One compilation for every position, memory that stays where it is, and no room for a copy of the keys."""
    traces = []

    def step(cache, q, k, v):
        traces.append(cache)
        cache = cache.append(k, v)
        return cache.attention(q), cache

    cache = full("jax", batch)
    arrays = [jax.numpy.ones((batch, heads, 1, D), jax.numpy.float32) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    compiled = jax.jit(step, donate_argnums=0)
    needs = compiled.lower(cache, *arrays).compile().memory_analysis()
    size, addresses = cache.keys.nbytes, [x.unsafe_buffer_pointer() for x in (cache.keys, cache.values)]
    assert needs.alias_size_in_bytes >= 2 * size
    # Paged: some pages at a time, and room for one copy of these without numbers that are not finite.
    assert needs.temp_size_in_bytes < size * (1.1 if kind == "paged" else 0.5)
    for _ in range(3):
        _, cache = compiled(cache, *arrays)
        assert [x.unsafe_buffer_pointer() for x in (cache.keys, cache.values)] == addresses
    assert len(traces) == 1
    assert cache.position == KEYS + 3


@pytest.mark.parametrize("batch", [1, 2])
def test_jax_compiles_one_step_for_every_position(batch):
    """Donated, the memory is where it was."""
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
    empty = pa.KVCache.create(2, KV_HEADS, 8, D, backend="jax")
    k, v = jax.numpy.asarray(K), jax.numpy.asarray(V)
    one, other = empty.append(k, v), empty.append(-k, v)
    assert (empty.position, one.position) == (0, N)
    np.testing.assert_array_equal(one.k, -other.k)


def test_jax_overflow_in_a_compiled_step_is_found_afterwards():
    compiled = jax.jit(lambda cache, k, v: cache.append(k, v))
    k, v = jax.numpy.asarray(K[:, :, :1]), jax.numpy.asarray(V[:, :, :1])
    cache = pa.KVCache.create(2, KV_HEADS, 1, D, backend="jax")
    for _ in range(2):
        cache = compiled(cache, k, v)
    with pytest.raises(pa.ArgumentError, match="holds 2 of 1"):
        cache.append(k, v)
