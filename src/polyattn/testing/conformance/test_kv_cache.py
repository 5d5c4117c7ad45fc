"""The key-value cache: decoding equals the whole forward for entries of any length, and overflow raises."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(53)
BATCH, HEADS, KV_HEADS, N, D_K, D_V = 2, 4, 2, 6, 8, 5
Q = RNG.standard_normal((BATCH, HEADS, N, D_K))
K, V = RNG.standard_normal((BATCH, KV_HEADS, N, D_K)), RNG.standard_normal((BATCH, KV_HEADS, N, D_V))


def create(contract: Any, make: Any, capacity: int = 9, dtype: str = "float64", batch: int = BATCH) -> pa.KVCache:
    device = contract.device_of(make([0.0]))
    return pa.KVCache.create(
        batch, KV_HEADS, capacity, D_K, D_V, dtype=dtype, backend=contract.name, device=device
    )  # fmt: skip


def at(x: Any, start: int, stop: int) -> Any:
    return x[:, :, start:stop]


@pytest.mark.parametrize("arguments", [{}, {"window": (2, 0)}, {"softcap": 2.0}, {"causal": False}], ids=str)
def test_token_by_token_equals_the_whole(contract: Any, make: Any, to_np: Any, dtype: Any, arguments: Any) -> None:
    q, k, v = (to_np(make(x, dtype)).astype(np.float64) for x in (Q, K, V))
    cache = create(contract, make, dtype=dtype)
    for i in range(N):
        cache = cache.append(make(at(k, i, i + 1), dtype), make(at(v, i, i + 1), dtype))
        out = cache.attention(make(at(q, i, i + 1), dtype), **arguments)
        assert contract.owns(out)
        seen = {"causal": True, **arguments}
        want = ref.attention(at(q, i, i + 1), at(k, 0, i + 1), at(v, 0, i + 1), q_offset=i, **seen).out
        assert_close(to_np(out), want, dtype, what=f"position {i}")
    assert cache.position == N
    np.testing.assert_array_equal(to_np(cache.k), to_np(make(K, dtype)))
    np.testing.assert_array_equal(to_np(cache.v), to_np(make(V, dtype)))


def test_prompt_then_tokens(contract: Any, make: Any, to_np: Any) -> None:
    """A prompt, then two positions, then one: each attends to the positions before it."""
    whole = ref.attention(Q, K, V, causal=True).out
    cache, start = create(contract, make), 0
    for stop in (3, 5, 6):
        cache = cache.append(make(at(K, start, stop)), make(at(V, start, stop)))
        assert_close(to_np(cache.attention(make(at(Q, start, stop)))), at(whole, start, stop))
        start = stop


def test_entries_of_different_lengths(contract: Any, make: Any, to_np: Any) -> None:
    """Padded prompts, rewound to their lengths; each entry continues at its own length."""
    lengths = np.array([4, 2])
    cache = create(contract, make).append(make(at(K, 0, 4)), make(at(V, 0, 4)))
    cache = cache.rewind(make(4 - lengths, "int32"))
    np.testing.assert_array_equal(to_np(cache.lengths), lengths)
    np.testing.assert_array_equal(to_np(cache.position), lengths)
    keys, values = ([x[b, :, :n] for b, n in enumerate(lengths)] for x in (K, V))
    for i in (4, 5):
        cache = cache.append(make(at(K, i, i + 1)), make(at(V, i, i + 1)))
        out = to_np(cache.attention(make(at(Q, i, i + 1))))
        for b in range(BATCH):
            keys[b] = np.concatenate([keys[b], K[b, :, i : i + 1]], axis=1)
            values[b] = np.concatenate([values[b], V[b, :, i : i + 1]], axis=1)
            assert_close(out[b], ref.attention(Q[b, :, i : i + 1], keys[b], values[b]).out, what=f"entry {b} at {i}")
        everything = to_np(cache.attention(make(at(Q, i, i + 1)), causal=False))  # up to each length, not beyond
        assert_close(everything, out, what=f"not causal, at {i}")
    np.testing.assert_array_equal(to_np(cache.lengths), [6, 4])
    assert tuple(cache.k.shape) == (BATCH, KV_HEADS, 6, D_K)


def test_rewound_and_written_again(contract: Any, make: Any, to_np: Any) -> None:
    """Speculative decoding: rewound positions have no effect, and are overwritten."""
    wrong = make(np.full((BATCH, KV_HEADS, 3, D_K), np.nan)), make(np.full((BATCH, KV_HEADS, 3, D_V), np.nan))
    cache = create(contract, make).append(make(at(K, 0, 3)), make(at(V, 0, 3)))
    for taken_back in ({"n": 3}, {"lengths": 3}, {"lengths": make([3, 3], "int32")}):
        cache = cache.append(*wrong).rewind(**taken_back)
        assert cache.position == 3
    assert_close(to_np(cache.attention(make(at(Q, 2, 3)))), ref.attention(at(Q, 2, 3), at(K, 0, 3), at(V, 0, 3)).out)
    cache = cache.append(make(at(K, 3, 6)), make(at(V, 3, 6)))
    assert_close(to_np(cache.attention(make(Q))), ref.attention(Q, K, V, causal=True).out)


def test_masks_are_as_wide_as_the_capacity(contract: Any, make: Any, to_np: Any) -> None:
    bias, mask = RNG.standard_normal((HEADS, 1, 9)), np.arange(9) % 4 != 1
    ids = RNG.integers(0, 2, 9)
    cache = create(contract, make).append(make(K), make(V))
    out = cache.attention(
        make(at(Q, 5, 6)), bias=make(bias), mask=make(mask, "bool"),
        segment_ids=(make([1], "int32"), make(ids, "int32")),
    )  # fmt: skip
    want = ref.attention(at(Q, 5, 6), K, V, bias=bias[..., :6], mask=mask[:6], segment_ids=([1], ids[:6])).out
    assert_close(to_np(out), want)
    with pytest.raises(pa.ShapeError, match=r"bias: .*9"):
        cache.attention(make(at(Q, 5, 6)), bias=make(bias[..., :6]))


def test_rotary_at_the_cache_s_position(contract: Any, make: Any, to_np: Any) -> None:
    """Keys rotated when they are appended, at their positions, equal those of the whole sequence."""
    turn = pa.functional.rotary_embedding
    cache = create(contract, make).append(make(at(K, 0, 2)), make(at(V, 0, 2))).rewind(make([0, 2], "int32"))
    cache = cache.append(turn(make(at(K, 2, 5)), offset=cache.position), make(at(V, 2, 5)))
    want = ref.rotary_embedding(at(K, 2, 5), offset=np.array([2, 0]))
    got = to_np(cache.k)
    assert_close(got[0, :, 2:5], want[0])
    assert_close(got[1, :, :3], want[1])


def test_a_copy_goes_its_own_way(contract: Any, make: Any, to_np: Any) -> None:
    cache = create(contract, make).append(make(at(K, 0, 2)), make(at(V, 0, 2)))
    other = cache.copy()
    cache = cache.append(make(at(K, 2, 3)), make(at(V, 2, 3)))
    other = other.append(make(at(K, 4, 5)), make(at(V, 4, 5)))
    np.testing.assert_array_equal(to_np(cache.k), at(K, 0, 3))
    np.testing.assert_array_equal(to_np(other.k), K[:, :, [0, 1, 4]])


USES: dict[str, Any] = {
    "append": lambda cache, make: cache.append(make(K), make(V)),
    "rewind": lambda cache, make: cache.rewind(0),
    "attention": lambda cache, make: cache.attention(make(Q)),
    "copy": lambda cache, make: cache.copy(),
    "k": lambda cache, make: cache.k,
    "capacity": lambda cache, make: cache.capacity,
}


@pytest.mark.parametrize("step", ["append", "rewind"])
@pytest.mark.parametrize("use", USES)
def test_a_cache_is_consumed_where_it_is_written_in_place(contract: Any, make: Any, step: Any, use: Any) -> None:
    cache = create(contract, make)
    USES[step](cache, make)
    if cache.in_place:
        with pytest.raises(pa.ArgumentError, match="consumes"):
            USES[use](cache, make)
        assert "consumed" in repr(cache)
    else:
        USES[use](cache, make)
        assert cache.position == 0


def test_overflow_writes_nothing(contract: Any, make: Any, to_np: Any) -> None:
    cache = create(contract, make, capacity=6).append(make(at(K, 0, 4)), make(at(V, 0, 4)))
    with pytest.raises(pa.ArgumentError, match=r"k: expected at most 2 more positions.*4 of 6.*got 3"):
        cache.append(make(at(K, 0, 3)), make(at(V, 0, 3)))
    cache = cache.append(make(at(K, 4, 6)), make(at(V, 4, 6)))
    np.testing.assert_array_equal(to_np(cache.k), K)


def test_an_empty_cache(contract: Any, make: Any, to_np: Any) -> None:
    cache = create(contract, make)
    assert cache.position == 0
    assert tuple(cache.k.shape) == (BATCH, KV_HEADS, 0, D_K)
    np.testing.assert_array_equal(to_np(cache.attention(make(at(Q, 0, 1)))), np.zeros((BATCH, HEADS, 1, D_V)))
    assert cache.append(make(at(K, 0, 0)), make(at(V, 0, 0))).position == 0


def test_arrays_of_another_library(contract: Any, make: Any) -> None:
    """A cache that is bound to a backend takes NumPy arrays, and returns NumPy arrays."""
    cache = create(contract, make).append(K, V)
    out = cache.attention(Q)
    assert type(out) is np.ndarray
    assert_close(out, ref.attention(Q, K, V, causal=True).out)


def test_bad_input(contract: Any, make: Any) -> None:
    cache, k, v = create(contract, make), make(K), make(V)
    for call, error, words in (
        (lambda: cache.append(k, make(V[..., :4])), pa.ShapeError, "v: "),
        (lambda: cache.append(make(K[:, :1]), v), pa.ShapeError, "k: "),
        (lambda: cache.append(make(K[0]), v), pa.ShapeError, "k: "),
        (lambda: cache.append(k, make(V[:, :, :3])), pa.ShapeError, "v: "),
        (lambda: cache.append(make(K, "float32"), v), pa.DTypeError, "k: .*float64.*float32"),
        (lambda: cache.append(None, v), pa.BackendMismatchError, "k: "),
        (lambda: cache.attention(make(Q, "float32")), pa.DTypeError, "q: "),
        (lambda: cache.attention(make(Q[..., :4])), pa.ShapeError, "k: .*4"),
        (lambda: cache.attention(make(Q), q_offset=1), TypeError, "q_offset"),
        (lambda: cache.rewind(1), pa.ArgumentError, "n: .*holds"),
        (lambda: cache.rewind(-1), pa.ArgumentError, "n: "),
        (lambda: cache.rewind(), pa.ArgumentError, "n: "),
        (lambda: cache.rewind(1.0), pa.DTypeError, "n: "),
        (lambda: cache.rewind(lengths=make([1, 1, 1], "int32")), pa.ShapeError, "lengths: "),
        (lambda: cache.rewind(lengths=2), pa.ArgumentError, "lengths: "),
        (lambda: pa.KVCache.create(2, 0, 4, 8), pa.ArgumentError, "kv_heads: "),
        (lambda: pa.KVCache.create(2, 2, True, 8), pa.DTypeError, "capacity: "),
        (lambda: pa.KVCache.create(2, 2, 4, 8, dtype="int32"), pa.DTypeError, "dtype: "),
    ):
        with pytest.raises(error, match=words):
            call()
    assert cache.position == 0


@pytest.mark.parametrize("batch", [1, 2])
def test_compiled_step(contract: Any, make: Any, to_np: Any, batch: Any) -> None:
    """A cache is an argument and a result of a compiled function, step by step."""

    def step(cache: Any, q: Any, k: Any, v: Any) -> Any:
        cache = cache.append(k, v)
        return cache.attention(q), cache

    compiled, cache = contract.jit(step), create(contract, make, batch=batch)
    want = ref.attention(Q[:batch], K[:batch], V[:batch], causal=True).out
    for i in range(N):
        out, cache = compiled(cache, *(make(at(x[:batch], i, i + 1)) for x in (Q, K, V)))
        assert_close(to_np(out), at(want, i, i + 1))
    assert cache.position == N
    np.testing.assert_array_equal(to_np(cache.k), K[:batch])
