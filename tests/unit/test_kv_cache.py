"""The cache on NumPy: it is written in place, nothing of its size is allocated, and decoding is fast."""

import tracemalloc

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(5)
HEADS, KV_HEADS, KEYS, D = 8, 2, 4096, 64


def draw(heads, n=1):
    return RNG.standard_normal((1, heads, n, D)).astype(np.float32)


@pytest.fixture
def full():
    """Return a cache with a few free positions."""
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


@pytest.mark.parametrize("kind", ["paged", "sliding"])
def test_the_other_kinds_copy_nothing_either(kind):
    """A step over 4096 keys, in 64 pages or in a full ring buffer, allocates less than half of the keys."""
    if kind == "paged":
        cache = pa.PagedKVCache.create(1, KV_HEADS, KEYS // 64 + 1, 64, D)
    else:
        cache = pa.SlidingKVCache.create(1, KV_HEADS, KEYS - 4, D, sink_tokens=4)
    addresses, size = (cache.keys.ctypes.data, cache.values.ctypes.data), cache.keys.nbytes
    q, k, v = draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)
    cache = cache.append(draw(KV_HEADS, KEYS), draw(KV_HEADS, KEYS)).append(k, v)
    cache.attention(q)
    tracemalloc.start()
    try:
        for _ in range(8):
            cache = cache.append(k, v)
            cache.attention(q)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size // (2 if kind == "paged" else 8)  # a page has a query, scores and a result of its own
    assert (cache.keys.ctypes.data, cache.values.ctypes.data) == addresses
    assert cache.position == KEYS + 9


@pytest.mark.parametrize("bias", [pa.alibi_bias(HEADS), pa.relative_position_bias(draw(8).reshape(8, -1)[:, :HEADS])])
def test_pages_know_how_far_their_keys_are(bias):
    """A structured bias: each page has its part of the whole bias."""
    q, k, v = draw(HEADS, 3), draw(KV_HEADS, 21), draw(KV_HEADS, 21)
    cache = pa.PagedKVCache.create(1, KV_HEADS, 6, 4, D).append(k, v)
    np.testing.assert_allclose(cache.attention(q, bias=bias), pa.attention(q, k, v, causal=True, bias=bias), atol=1e-6)


def test_a_sliding_cache_stays_as_large_as_it_is():
    cache = pa.SlidingKVCache.create(1, 1, 8, 2, sink_tokens=1, chunk=4)
    k = np.ones((1, 1, 5, 2), np.float32)
    for _ in range(1000):
        cache = cache.append(k, k)
    assert (cache.position, cache.capacity, cache.keys.nbytes) == (5000, 12, 12 * 2 * 4)
    np.testing.assert_array_equal(np.sort(cache.key_positions[0]), [0, *range(4989, 5000)])


def test_many_sequences_share_a_pool():
    """Random appends and rewinds, compared with a list of positions for each entry; no page is lost or used twice."""
    rng, texts = np.random.default_rng(8), [[] for _ in range(3)]
    cache = pa.PagedKVCache.create(3, 1, 12, 4, 1, dtype="float64")
    for step in range(200):
        n, room = int(rng.integers(0, 7)), cache.capacity
        wanted = sum(-(-(len(text) + n) // 4) for text in texts)
        new = rng.standard_normal((3, 1, n, 1))
        if wanted > 12:
            with pytest.raises(pa.ArgumentError, match=f"make {wanted} pages of 4"):
                cache.append(new, new)
        else:
            cache = cache.append(new, -new)
            for text, part in zip(texts, new, strict=True):
                text.extend(part.ravel())
        back = np.array([rng.integers(0, min(len(text), 9 if step % 3 else 3) + 1) for text in texts])
        cache = cache.rewind(back)
        for text, some in zip(texts, back, strict=True):
            del text[len(text) - some :]
        assert (cache.capacity, cache.lengths.tolist()) == (room, [len(text) for text in texts])
        assert cache.free_pages == 12 - sum(-(-len(text) // 4) for text in texts)
        assert (
            len(set(cache.owners[cache.owners >= 0] * 100 + cache.numbers[cache.owners >= 0])) == 12 - cache.free_pages
        )
        k, v = cache.k, cache.v
        for entry, text in enumerate(texts):
            np.testing.assert_array_equal(k[entry, 0, : len(text), 0], text)
            np.testing.assert_array_equal(v[entry, 0, : len(text), 0], np.negative(text))


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_ring_holds_what_its_queries_may_see(chunk):
    """Random appends and rewinds: if attention does not raise, it equals attention over the whole sequence."""
    rng, window, first = np.random.default_rng(9), 5, 2
    cache = pa.SlidingKVCache.create(2, 1, window, 1, sink_tokens=first, chunk=chunk, dtype="float64")
    texts, answers = [[], []], 0
    for _ in range(300):
        n = int(rng.integers(1, 4))
        new = rng.standard_normal((2, 1, n, 1))
        cache = cache.append(new, new)
        for text, part in zip(texts, new, strict=True):
            text.extend(part.ravel())
        q = rng.standard_normal((2, 1, int(rng.integers(1, n + 1)), 1))
        try:
            out = cache.attention(q)
        except pa.ArgumentError:
            assert q.shape[2] > chunk
        else:
            answers += 1
            for b, text in enumerate(texts):
                away = np.arange(len(text)) - np.arange(len(text) - q.shape[2], len(text))[:, None]
                mask = (away <= 0) & ((away > -window) | (np.arange(len(text)) < first))
                x = np.array(text)[None, :, None]
                np.testing.assert_allclose(out[b], ref.attention(q[b], x, x, mask=mask).out, atol=1e-12)
        back = rng.integers(0, n + 1, 2)
        if (back > chunk).any() and min(map(len, texts)) > 40:
            with pytest.raises(pa.ArgumentError, match=f"n: .*chunk={chunk}"):
                cache.rewind(back)
            back = back * 0
        try:
            cache = cache.rewind(back)
        except pa.ArgumentError:
            continue
        for text, some in zip(texts, back, strict=True):
            del text[len(text) - some :]
    assert answers > 100


def test_entries_of_different_lengths_are_written_in_place():
    cache = pa.KVCache.create(3, KV_HEADS, 8, D)
    address = cache.keys.ctypes.data
    k = RNG.standard_normal((3, KV_HEADS, 4, D)).astype(np.float32)
    cache = cache.append(k, k).rewind(np.array([0, 1, 3])).append(k[:, :, :1], k[:, :, 1:2])
    assert cache.keys.ctypes.data == address
    np.testing.assert_array_equal(cache.lengths, [5, 4, 2])
    np.testing.assert_array_equal(cache.keys[2, :, :2], k[2][:, [0, 0]])
    np.testing.assert_array_equal(cache.values[1, :, :4], k[1][:, [0, 1, 2, 1]])


def test_decoding_picks_a_kernel_for_one_query(full):
    q = draw(HEADS)
    explanation = pa.explain(q, full.k, full.v, causal=True, q_offset=full.position - 1)
    assert explanation.kernel == ("direct" if "native" in explanation.refusals else "native")
    np.testing.assert_array_equal(full.attention(q), full.attention(q, kernel=explanation.kernel))
    assert_close(full.attention(q), full.attention(q, kernel="direct"), "float32")


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


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kernel", [None, "plain"])
def test_scores_beyond_the_range_of_pages(kernel, sign):
    """All scores are beyond float32: the pages' results cannot be represented, but the merged one can."""
    q, k, v = (RNG.uniform(0.5, 1.5, (1, 2, n, 8)).astype(np.float32) for n in (1, 40, 40))
    best = np.argmax(sign * q @ np.swapaxes(k, -1, -2), axis=-1)[..., None]  # (1, 2, 1, 1)
    q, k = q * np.float32(sign * 1e19), k * np.float32(1e20)
    wins, same = np.take_along_axis(v, best, axis=2), np.mean(v, axis=2, keepdims=True)
    for keys, expected in ((k, wins), (np.full_like(k, 1e20), same)):
        cache = pa.PagedKVCache.create(1, 2, pages=12, page_size=4, head_dim=8).append(keys, v)
        assert_close(cache.attention(q, kernel=kernel), expected, "float32")
