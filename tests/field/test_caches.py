"""Reports of key-value caches and rotary embeddings. docs/field.md has the links."""

import math

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(143)
Q, K, V = RNG.standard_normal((3, 2, 1, 11, 4))


@pytest.fixture
def create(contract, make):
    """Return ``create(kind, **sizes)``: an empty cache of two entries, one head and four features."""
    place = {"dtype": "float64", "backend": contract.name, "device": contract.device_of(make([0.0]))}
    return lambda kind, batch=2, **sizes: getattr(pa, kind).create(batch, 1, head_dim=4, **sizes, **place)


def test_transformers_37574_a_window_that_fills_up(create, make, to_np):
    """A prompt of 6 into a window of 8, then five tokens: at the eighth and after it the window has its last eight."""
    cache = create("SlidingKVCache", window=8, chunk=6).append(make(K[:, :, :6]), make(V[:, :, :6]))
    for i in range(6, 11):
        cache = cache.append(make(K[:, :, i : i + 1]), make(V[:, :, i : i + 1]))
        first = max(0, i - 7)
        want = ref.attention(Q[:, :, i : i + 1], K[:, :, first : i + 1], V[:, :, first : i + 1]).out
        assert_close(to_np(cache.attention(make(Q[:, :, i : i + 1]))), want)
        held = to_np(cache.key_positions)[0]
        assert {*range(first, i + 1)} <= {*held.tolist()}


def test_flax_5591_one_causal_query_sees_all_that_is_held(create, make, to_np):
    """Queries of zero: the mean of the values so far, not the first value."""
    cache = create("KVCache", capacity=8)
    for i in range(4):
        cache = cache.append(make(K[:, :, i : i + 1]), make(V[:, :, i : i + 1]))
        out = cache.attention(make(np.zeros((2, 1, 1, 4))), causal=True)
        assert_close(to_np(out), V[:, :, : i + 1].mean(axis=2, keepdims=True))


@pytest.mark.parametrize("kind", ["int8", "int32", "int64", "uint8"])
def test_flax_3571_lengths_of_every_integer(kind, create, make, to_np):
    """Float64 keys and lengths of any integer dtype: positions stay positions."""
    cache = create("KVCache", capacity=12).append(make(K[:, :, :5]), make(V[:, :, :5]))
    cache = cache.rewind(make([1, 3], kind)).append(make(K[:, :, 5:6]), make(V[:, :, 5:6]))
    np.testing.assert_array_equal(to_np(cache.lengths), [5, 3])
    out = to_np(cache.attention(make(Q[:, :, :1])))
    for entry, held in ((0, [0, 1, 2, 3, 5]), (1, [0, 1, 5])):
        assert_close(out[entry], ref.attention(Q[entry, :, :1], K[entry][:, held], V[entry][:, held]).out)


def test_transformers_47433_to_nothing_and_beyond(create, make, to_np):
    """A length of 0 empties a cache of three; five fewer than three is an error that changes nothing."""
    for kind, sizes in (("KVCache", {"capacity": 8}), ("PagedKVCache", {"pages": 8, "page_size": 2})):
        cache = create(kind, **sizes).append(make(K[:, :, :3]), make(V[:, :, :3]))
        with pytest.raises(pa.ArgumentError, match="n"):
            cache.rewind(5)
        np.testing.assert_array_equal(to_np(cache.lengths), [3, 3])
        assert cache.rewind(lengths=0).position == 0


def test_transformers_42960_a_batch_of_another_size(create, make, to_np):
    """Keys of one entry into a cache of two: ShapeError, and the cache is as it was."""
    cache = create("KVCache", capacity=8).append(make(K[:, :, :3]), make(V[:, :, :3]))
    with pytest.raises(pa.ShapeError, match="k"):
        cache.append(make(K[:1, :, 3:4]), make(V[:1, :, 3:4]))
    want = ref.attention(Q[:, :, 2:3], K[:, :, :3], V[:, :, :3]).out
    assert_close(to_np(cache.attention(make(Q[:, :, 2:3]))), want)


def test_vllm_7845_a_prefix_that_is_used_again(create, make, to_np):
    """Two continuations of one prefix, the first of other tokens: the second equals a run from the start."""
    prefix = create("KVCache", capacity=12).append(make(K[:, :, :5]), make(V[:, :, :5]))
    first = prefix.copy().append(make(-K[:, :, 5:9]), make(9 * V[:, :, 5:9]))
    to_np(first.attention(make(Q[:, :, 5:9])))
    second = prefix.append(make(K[:, :, 5:8]), make(V[:, :, 5:8]))
    want = ref.attention(Q[:, :, 5:8], K[:, :, :8], V[:, :, :8], causal=True).out
    assert_close(to_np(second.attention(make(Q[:, :, 5:8]))), want)


@pytest.mark.parametrize("kind", ["KVCache", "PagedKVCache"])
def test_vllm_37076_memory_that_held_something_else(kind, create, make, to_np):
    """NaN and infinity were written and taken back: what is written there later is all that is read."""
    cache = create(kind, **({"capacity": 8} if kind == "KVCache" else {"pages": 8, "page_size": 2}))
    bad = np.where(np.arange(6)[:, None] % 2, np.nan, np.inf) + np.zeros((2, 1, 6, 4))
    cache = cache.append(make(bad), make(bad)).rewind(lengths=0)
    cache = cache.append(make(K[:, :, :3]), make(V[:, :, :3]))
    out = cache.attention(make(Q[:, :, :3]))
    assert_close(to_np(out), ref.attention(Q[:, :, :3], K[:, :, :3], V[:, :, :3], causal=True).out)


def test_llama_cpp_3825_shifts_add_up(make, to_np):
    """Keys rotated to 5, then shifted by −2 twice, are keys rotated to 1."""
    x = RNG.standard_normal((2, 3, 8))
    shifted = F.rotary_embedding(make(x), offset=5)
    for _ in range(2):
        shifted = F.rotary_embedding(shifted, positions=make([-2, -2, -2], "int32"))
    assert_close(to_np(shifted), to_np(F.rotary_embedding(make(x), offset=1)))


def test_transformers_25199_halves_and_neighbours(make, to_np):
    """Pairs of neighbours, and pairs of halves with the features reordered, give the same scores."""
    q, k = RNG.standard_normal((2, 2, 5, 8))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    scores = []
    for interleaved, features in ((True, slice(None)), (False, order)):
        turned = [F.rotary_embedding(make(x[..., features]), interleaved=interleaved) for x in (q, k)]
        scores.append(np.matmul(to_np(turned[0]), np.swapaxes(to_np(turned[1]), -1, -2)))
    assert_close(scores[0], scores[1])


@pytest.mark.parametrize("report", ["llama-cpp-2376", "transformers-31788"])
def test_reordered_projections_of_grouped_heads(report, contract, make, to_np):
    """For halves, the columns of q are reordered by 4 heads and those of k by 2, each within its own heads."""
    place = {"backend": contract.name, "device": contract.device_of(make([0.0]))}
    kv_heads = 2 if report == "transformers-31788" else 1
    sizes = {"num_heads": 4, "num_kv_heads": kv_heads, "bias": False, "dtype": "float64", **place}
    pairs = pa.MultiHeadAttention(16, rotary={"interleaved": True}, **sizes)
    parameters = {name: to_np(x) for name, x in pairs.parameters().items()}
    for name, heads in (("q_proj.weight", 4), ("k_proj.weight", kv_heads)):
        split = parameters[name].reshape(16, heads, 2, 2)  # (in, head, pair, member)
        parameters[name] = np.swapaxes(split, 2, 3).reshape(16, heads * 4)
    halves = pa.MultiHeadAttention(16, rotary=True, **sizes)
    halves = halves.with_parameters({name: make(x) for name, x in parameters.items()})
    x = make(RNG.standard_normal((2, 5, 16)))
    assert_close(to_np(halves(x, causal=True)), to_np(pairs(x, causal=True)))


def test_vllm_48621_the_factor_of_yarn(make, to_np):
    """Factor 16: by default queries and keys grow by 0.1 ln 16 + 1; a factor of 1 that is given is kept."""
    x = RNG.standard_normal((1, 6, 32))
    for given, want in ((None, 0.1 * math.log(16) + 1), (1.0, 1.0)):
        scaling = F.YaRNScaling(factor=16.0, original_length=64, attention_factor=given)
        y = to_np(F.rotary_embedding(make(x), scaling=scaling))
        assert_close(np.linalg.norm(y, axis=-1), want * np.linalg.norm(x, axis=-1))
