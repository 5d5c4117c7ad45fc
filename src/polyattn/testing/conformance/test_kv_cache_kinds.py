"""Paged and sliding caches: the checks of the fixed one, with a shared pool of pages and with a ring buffer."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(54)
BATCH, HEADS, KV_HEADS, N, D_K, D_V = 2, 4, 2, 11, 8, 5
Q = RNG.standard_normal((BATCH, HEADS, N, D_K))
K, V = RNG.standard_normal((BATCH, KV_HEADS, N, D_K)), RNG.standard_normal((BATCH, KV_HEADS, N, D_V))
WINDOW, SINK_TOKENS = 3, 2
SINKS = RNG.standard_normal(HEADS)
PAGE, PAGES = 2, 16


def create(contract: Any, make: Any, kind: str, *, dtype: str = "float64", **more: Any) -> Any:
    where = {"dtype": dtype, "backend": contract.name, "device": contract.device_of(make([0.0]))}
    if kind == "fixed":
        return pa.KVCache.create(BATCH, KV_HEADS, **{"capacity": 16} | more, head_dim=D_K, value_dim=D_V, **where)
    if kind == "paged":
        sizes = {"pages": PAGES, "page_size": PAGE} | more
        return pa.PagedKVCache.create(BATCH, KV_HEADS, **sizes, head_dim=D_K, value_dim=D_V, **where)
    sizes = {"window": WINDOW, "sink_tokens": SINK_TOKENS} | more
    return pa.SlidingKVCache.create(BATCH, KV_HEADS, **sizes, head_dim=D_K, value_dim=D_V, **where)


def at(x: Any, start: int, stop: int) -> Any:
    return x[:, :, start:stop]


def seen(kind: str, first: int, stop: int, window: int = WINDOW, sink_tokens: int = SINK_TOKENS) -> Any:
    """Return the keys before ``stop`` to which the queries from ``first`` on may attend."""
    away = np.arange(stop) - np.arange(first, stop)[:, None]
    if kind != "sliding":
        return away <= 0
    return (away <= 0) & ((away > -window) | (np.arange(stop) < sink_tokens))


def want_of(kind: str, start: int, stop: int, entry: Any = slice(None), **arguments: Any) -> Any:
    """Return the rows from ``start`` to ``stop`` of attention over the whole sequence."""
    mask = seen(kind, start, stop)
    q, k, v = Q[entry][..., start:stop, :], K[entry][..., :stop, :], V[entry][..., :stop, :]
    return ref.attention(q, k, v, mask=mask, **arguments).out


@pytest.mark.parametrize("kind", ["paged", "sliding"])
def test_token_by_token_equals_the_whole(contract: Any, make: Any, to_np: Any, kind: Any) -> None:
    cache = create(contract, make, kind)
    for i in range(N):
        cache = cache.append(make(at(K, i, i + 1)), make(at(V, i, i + 1)))
        out = cache.attention(make(at(Q, i, i + 1)), softcap=3.0, sinks=make(SINKS))
        assert contract.owns(out)
        assert_close(to_np(out), want_of(kind, i, i + 1, softcap=3.0, sinks=SINKS), what=f"position {i}")
    assert cache.position == N


@pytest.mark.parametrize("kind", ["paged", "sliding"])
def test_prompts_of_different_lengths_then_chunks(contract: Any, make: Any, to_np: Any, kind: Any) -> None:
    """Padded prompts, rewound; then two positions at a time, across pages and the end of the ring buffer."""
    more: dict[str, Any] = {"chunk": 3} if kind == "sliding" else {}
    cache, lengths = create(contract, make, kind, **more), np.array([3, 1])
    cache = cache.append(make(at(K, 0, 3)), make(at(V, 0, 3))).rewind(lengths=make(lengths, "int32"))
    for step in range(3):
        starts = lengths + 2 * step
        rows = starts[:, None] + np.arange(2)
        q, k, v = (np.stack([x[b][:, rows[b]] for b in range(BATCH)]) for x in (Q, K, V))
        cache = cache.append(make(k), make(v))
        out = to_np(cache.attention(make(q)))
        for b, start in enumerate(starts):
            assert_close(out[b], want_of(kind, start, start + 2, b), what=f"entry {b} at {start}")
    np.testing.assert_array_equal(to_np(cache.lengths), lengths + 6)


@pytest.mark.parametrize("kind", ["fixed", "paged", "sliding"])
def test_a_compiled_step_is_right_to_a_millionth(contract: Any, make: Any, to_np: Any, kind: Any) -> None:
    """Entries of different lengths in float32, token by token: each equals the full forward over its own sequence."""

    def step(cache: Any, q: Any, k: Any, v: Any) -> Any:
        cache = cache.append(k, v)
        return cache.attention(q), cache

    compiled, cache, starts = contract.jit(step), create(contract, make, kind, dtype="float32"), np.array([2, 1])
    cache = cache.append(make(at(K, 0, 2), "float32"), make(at(V, 0, 2), "float32")).rewind(make([0, 1], "int32"))
    q, k, v = (x.astype(np.float32).astype(np.float64) for x in (Q, K, V))
    for i in range(7):
        now = [x[np.arange(BATCH), :, starts + i][:, :, None] for x in (q, k, v)]
        out, cache = compiled(cache, *(make(x, "float32") for x in now))
        for b, stop in enumerate(starts + i + 1):
            want = ref.attention(now[0][b], k[b, :, :stop], v[b, :, :stop], mask=seen(kind, stop - 1, stop)).out
            np.testing.assert_allclose(to_np(out)[b], want, atol=1e-6, rtol=0)
    np.testing.assert_array_equal(to_np(cache.lengths), starts + 7)


@pytest.mark.parametrize("kind", ["paged", "sliding"])
def test_nan_of_one_entry_stays_there(contract: Any, make: Any, to_np: Any, kind: Any) -> None:
    """Neither rewound positions nor free pages affect any entry."""
    bad = np.full((BATCH, KV_HEADS, 2, D_V), np.nan)
    more: dict[str, Any] = {"chunk": 3} if kind == "sliding" else {}
    cache = create(contract, make, kind, **more)
    cache = cache.append(make(at(K, 0, 2)), make(bad)).rewind(2)
    values = V.copy()
    values[1, :, 1] = np.nan
    cache = cache.append(make(at(K, 0, 3)), make(at(values, 0, 3)))
    out = to_np(cache.attention(make(at(Q, 2, 3))))
    assert_close(out[0], want_of(kind, 2, 3, 0))
    assert np.isnan(out[1]).all()


# ---- paged ----------------------------------------------------------------------------------------------------


def test_pages_are_given_out_and_come_back(contract: Any, make: Any, to_np: Any) -> None:
    cache = create(contract, make, "paged", pages=4)
    assert (cache.capacity, cache.page_size, cache.free_pages) == (8, 2, 4)
    cache = cache.append(make(at(K, 0, 3)), make(at(V, 0, 3))).rewind(make([0, 2], "int32"))
    assert cache.table.tolist() == [[0, 1], [2, -1]]
    cache = cache.append(make(at(K, 3, 4)), make(at(V, 3, 4)))
    with pytest.raises(pa.ArgumentError, match=r"k: .*make 5 pages of 2.*has 4.*\[4, 2\]"):
        cache.append(make(at(K, 4, 5)), make(at(V, 4, 5)))
    assert cache.table.tolist() == [[0, 1], [2, -1]]
    cache = cache.rewind(make([2, 0], "int32")).append(make(at(K, 4, 5)), make(at(V, 4, 5)))
    assert cache.table.tolist() == [[0, 1], [2, 3]]
    assert cache.free_pages == 0
    k, v = to_np(cache.k), to_np(cache.v)
    np.testing.assert_array_equal(k[0], K[0][:, [0, 1, 4]])
    np.testing.assert_array_equal(k[1], K[1][:, [0, 3, 4]])
    np.testing.assert_array_equal(v[1], V[1][:, [0, 3, 4]])


def test_one_entry_may_take_most_of_the_pool(contract: Any, make: Any, to_np: Any) -> None:
    """Lengths of 10 and 1 need six pages; a fixed cache would need the memory of ten."""
    cache = create(contract, make, "paged", pages=6)
    for i in range(10):
        cache = cache.append(make(at(K, i, i + 1)), make(at(V, i, i + 1))).rewind(make([0, int(i > 0)], "int32"))
    np.testing.assert_array_equal(to_np(cache.lengths), [10, 1])
    assert cache.free_pages == 0
    np.testing.assert_array_equal(to_np(cache.k)[0], K[0, :, :10])
    np.testing.assert_array_equal(to_np(cache.v)[1, :, :1], V[1, :, :1])
    q = np.stack([Q[0, :, 9:10], Q[1, :, 0:1]])
    out = to_np(cache.attention(make(q)))
    assert_close(out[0], want_of("paged", 9, 10, 0))
    assert_close(out[1], want_of("paged", 0, 1, 1))


@pytest.mark.parametrize("arguments", [{}, {"causal": False, "window": (3, 1), "scale": -0.3}], ids=str)
def test_a_paged_prompt(contract: Any, make: Any, to_np: Any, monkeypatch: Any, arguments: Any) -> None:
    """Many queries, a few pages at a time; the last group of pages overlaps the one before."""
    monkeypatch.setattr("polyattn.kv_cache._paged.NUMBERS", 2 * HEADS * N * (D_K + D_V))
    cache = create(contract, make, "paged", pages=13).append(make(K), make(V))
    want = ref.attention(Q, K, V, **{"causal": True} | arguments).out
    assert_close(to_np(cache.attention(make(Q), **arguments)), want)


def test_paged_arguments_are_as_wide_as_the_pool(contract: Any, make: Any, to_np: Any) -> None:
    capacity = PAGES * PAGE
    bias, mask = RNG.standard_normal((HEADS, 1, capacity)), np.array([[True], [False]])[:, None, None, :]
    ids = RNG.integers(0, 2, (BATCH, capacity))
    cache = create(contract, make, "paged").append(make(K), make(V))
    segments = (make([1, 1], "int32"), make(ids, "int32"))
    out = cache.attention(make(at(Q, 9, 11)), bias=make(bias), mask=make(mask, "bool"), segment_ids=segments)
    whole = {"bias": bias[..., :N], "mask": mask, "segment_ids": ([1, 1], ids[:, :N])}
    assert_close(to_np(out), ref.attention(at(Q, 9, 11), K, V, causal=True, **whole).out)


# ---- sliding --------------------------------------------------------------------------------------------------


def test_the_ring_holds_the_last_positions(contract: Any, make: Any, to_np: Any) -> None:
    """For a prompt longer than the ring buffer and for single positions; the capacity is constant."""
    cache, other = (create(contract, make, "sliding") for _ in range(2))
    cache = cache.append(make(at(K, 0, 9)), make(at(V, 0, 9)))
    for i in range(9):
        other = other.append(make(at(K, i, i + 1)), make(at(V, i, i + 1)))
    for one in (cache, other):
        assert (one.position, one.capacity) == (9, SINK_TOKENS + WINDOW)
        np.testing.assert_array_equal(to_np(one.key_positions), [[0, 1, 8, 6, 7]] * BATCH)
        np.testing.assert_array_equal(to_np(one.k), K[:, :, [0, 1, 8, 6, 7]])
        np.testing.assert_array_equal(to_np(one.v), V[:, :, [0, 1, 8, 6, 7]])


def test_rotary_positions_are_those_of_the_text(contract: Any, make: Any, to_np: Any) -> None:
    turn = ref.rotary_embedding
    cache = create(contract, make, "sliding").append(make(turn(at(K, 0, 8))), make(at(V, 0, 8)))
    q, k = turn(Q), turn(K)
    for i in range(8, N):
        q_now, k_now = (make(turn(at(x, i, i + 1), offset=cache.position)) for x in (Q, K))
        cache = cache.append(k_now, make(at(V, i, i + 1)))
        want = ref.attention(at(q, i, i + 1), at(k, 0, i + 1), at(V, 0, i + 1), mask=seen("sliding", i, i + 1)).out
        assert_close(to_np(cache.attention(q_now)), want, what=f"position {i}")


def test_a_ring_is_rewound_as_far_as_it_still_holds(contract: Any, make: Any, to_np: Any) -> None:
    cache = create(contract, make, "sliding", chunk=3).append(make(at(K, 0, 8)), make(at(V, 0, 8)))
    with pytest.raises(pa.ArgumentError, match=r"n: .*chunk=3"):
        cache.rewind(4)
    cache = cache.rewind(1).rewind(2)
    with pytest.raises(pa.ArgumentError, match=r"n: .*chunk=3"):
        cache.rewind(1)
    cache = cache.append(make(at(K, 5, 6)), make(at(V, 5, 6)))
    assert_close(to_np(cache.attention(make(at(Q, 5, 6)))), want_of("sliding", 5, 6))
    held = np.array([0, 1, 3, 4, 5])
    positions = to_np(cache.key_positions)[0]
    assert sorted(positions[positions >= 0].tolist()) == held.tolist()


def test_sliding_masks_lie_as_the_memory_does(contract: Any, make: Any, to_np: Any) -> None:
    """A bias by the position in each slot of the ring buffer, and a mask by the slot."""
    cache = create(contract, make, "sliding").append(make(at(K, 0, 9)), make(at(V, 0, 9)))
    positions = to_np(cache.key_positions)[0]
    bias, mask = RNG.standard_normal(9), np.array([True, True, True, False, True])
    out = cache.attention(make(at(Q, 8, 9)), bias=make(bias[positions]), mask=make(mask, "bool"))
    kept = seen("sliding", 8, 9) & (np.arange(9) != positions[3])
    assert_close(to_np(out), ref.attention(at(Q, 8, 9), at(K, 0, 9), at(V, 0, 9), bias=bias, mask=kept).out)


# ---- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["paged", "sliding"])
def test_bad_input_changes_nothing(contract: Any, make: Any, to_np: Any, kind: Any) -> None:
    cache, k, v = create(contract, make, kind), make(at(K, 0, 4)), make(at(V, 0, 4))
    cache = cache.append(k, v)
    ids = (make([1], "int32"), make([1], "int32"))
    for call, error, words in (
        (lambda: cache.append(k, v[..., :4]), pa.ShapeError, "v: "),
        (lambda: cache.append(k[:1, ...], v), pa.ShapeError, "k: "),
        (lambda: cache.append(k, make(at(V, 0, 3))), pa.ShapeError, "v: "),
        (lambda: cache.append(make(K, "float32"), v), pa.DTypeError, "k: .*float64.*float32"),
        (lambda: cache.append(None, v), pa.BackendMismatchError, "k: "),
        (lambda: cache.attention(make(Q, "float32")), pa.DTypeError, "q: "),
        (lambda: cache.attention(make(at(Q, 3, 4)[..., :4])), pa.ShapeError, "k: .*4"),
        (lambda: cache.attention(make(Q[:, :3, 3:4])), pa.ShapeError, "q: .*heads"),
        (lambda: cache.attention(make(at(Q, 3, 4)), key_lengths=1), TypeError, "key_lengths"),
        (lambda: cache.attention(make(at(Q, 3, 4)), dropout=0.1, seed=1), TypeError, "dropout"),
        (lambda: cache.attention(make(at(Q, 3, 4)), mask=make(np.ones(7), "bool")), pa.ShapeError, "mask: .*capacity"),
        (lambda: cache.attention(make(at(Q, 3, 4)), segment_ids=ids), pa.ShapeError, "segment_ids: .*capacity"),
        (lambda: cache.attention(make(at(Q, 3, 4)), mask=pa.prefix_mask(2)), pa.ArgumentError, "mask: .*PrefixMask"),
        (lambda: cache.rewind(5), pa.ArgumentError, "n: .*holds"),
        (lambda: cache.rewind(), pa.ArgumentError, "n: "),
        (lambda: pa.PagedKVCache.create(2, 2, 0, 4, 8), pa.ArgumentError, "pages: "),
        (lambda: pa.SlidingKVCache.create(2, 2, 4, 8, sink_tokens=-1), pa.ArgumentError, "sink_tokens: "),
    ):
        with pytest.raises(error, match=words):
            call()
    if kind == "sliding":
        with pytest.raises(pa.ArgumentError, match=r"q: .*1 queries.*got 4"):
            cache.append(k, v).attention(make(at(Q, 0, 4)))
        with pytest.raises(pa.ArgumentError, match=r"bias: .*AlibiBias"):
            create(contract, make, kind).attention(make(at(Q, 3, 4)), bias=pa.alibi_bias(HEADS))
        return
    assert cache.position == 4
    np.testing.assert_array_equal(to_np(cache.k), at(K, 0, 4))
    np.testing.assert_array_equal(to_np(cache.v), at(V, 0, 4))


@pytest.mark.parametrize("kind", ["paged", "sliding"])
def test_it_is_consumed_where_it_is_written_in_place(contract: Any, make: Any, kind: Any) -> None:
    cache = create(contract, make, kind)
    cache.append(make(at(K, 0, 1)), make(at(V, 0, 1)))
    if cache.in_place:
        uses: list[Any] = [lambda: cache.append(make(K), make(V)), lambda: cache.k, lambda: cache.capacity]
        for use in uses:
            with pytest.raises(pa.ArgumentError, match="consumes"):
                use()
    else:
        assert (cache.position, cache.append(make(at(K, 0, 1)), make(at(V, 0, 1))).position) == (0, 1)
