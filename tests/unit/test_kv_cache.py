"""The cache on NumPy: its memory stays where it is, nothing of its size is allocated, and decoding is fast."""

import tracemalloc

import numpy as np
import pytest

import polyattn as pa

RNG = np.random.default_rng(5)
HEADS, KV_HEADS, KEYS, D = 8, 2, 4096, 64


def draw(heads, n=1):
    return RNG.standard_normal((1, heads, n, D)).astype(np.float32)


@pytest.fixture
def full():
    """Return a cache with room for a few positions more."""
    cache = pa.KVCache.create(1, KV_HEADS, KEYS + 16, D)
    return cache.append(draw(KV_HEADS, KEYS), draw(KV_HEADS, KEYS))


def test_decoding_never_copies_the_cache(full):
    """4096 keys are 2 MiB, and as much for the values; a step allocates the scores and less than a twentieth of it."""
    addresses, size = (full.keys.ctypes.data, full.values.ctypes.data), full.keys.nbytes
    q, k, v = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    full = full.append(k, v)
    full.attention(q)  # what is loaded and kept once is not counted
    tracemalloc.start()
    try:
        for _ in range(8):
            full = full.append(k, v)
            full.attention(q)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    scores = HEADS * (KEYS + 9) * q.itemsize
    assert peak < 4 * scores + size // 20
    assert (full.keys.ctypes.data, full.values.ctypes.data) == addresses
    assert np.shares_memory(full.k, full.keys)
    np.testing.assert_array_equal(full.k[:, :, -1:], k)


def test_entries_of_different_lengths_are_written_in_place():
    cache = pa.KVCache.create(3, KV_HEADS, 8, D)
    address = cache.keys.ctypes.data
    k = RNG.standard_normal((3, KV_HEADS, 4, D)).astype(np.float32)
    cache = cache.append(k, k).rewind(np.array([0, 1, 3])).append(k[:, :, :1], k[:, :, 1:2])
    assert cache.keys.ctypes.data == address
    np.testing.assert_array_equal(cache.lengths, [5, 4, 2])
    np.testing.assert_array_equal(cache.keys[2, :, :2], k[2][:, [0, 0]])
    np.testing.assert_array_equal(cache.values[1, :, :4], k[1][:, [0, 1, 2, 1]])


@pytest.mark.parametrize("kernel", [None, "direct"])
def test_decoding_picks_the_direct_kernel(full, kernel):
    q = draw(HEADS)
    explanation = pa.explain(q, full.k, full.v, causal=True, q_offset=full.position - 1)
    assert explanation.kernel == "direct"
    np.testing.assert_array_equal(full.attention(q), full.attention(q, kernel=kernel))


def test_a_cache_made_by_default_refuses_other_libraries(other):
    from other_one import backend

    x = backend.asarray(draw(KV_HEADS))
    with pytest.raises(pa.BackendMismatchError, match=r"k: .*made on numpy on cpu by default.*other-one"):
        pa.KVCache.create(1, KV_HEADS, 4, D).append(x, x)
    with pa.use_backend("numpy"):
        cache = pa.KVCache.create(1, KV_HEADS, 4, D)
    out = cache.append(x, x).attention(x)
    assert backend.owns(out)
    assert cache.place.backend.name == "numpy"
