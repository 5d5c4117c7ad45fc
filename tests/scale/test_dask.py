"""Attention on Dask arrays: equal to one process, lazy, and without tasks for what is excluded."""

import dask
import dask.array as da
import numpy as np
import pytest

import polyattn as pa
from polyattn.distributed import dask as over_dask

RNG = np.random.default_rng(0)
BATCH, HEADS, KV_HEADS, N_Q, N_K, D_K, D_V = 2, 4, 2, 50, 70, 8, 6
Q, K, V = (
    RNG.normal(size=shape)
    for shape in ((BATCH, HEADS, N_Q, D_K), (BATCH, KV_HEADS, N_K, D_K), (BATCH, KV_HEADS, N_K, D_V))
)
DOUT, DLSE = RNG.normal(size=(BATCH, HEADS, N_Q, D_V)), RNG.normal(size=(BATCH, HEADS, N_Q))
CHUNKS = {"q": (1, 2, 16, D_K), "k": (1, 1, 24, D_K), "v": (1, 1, 24, D_V), "dout": (1, 2, 16, D_V)}
BLOCKS = pa.block_mask(RNG.random((HEADS, 4, 9)) > 0.4, (16, 8))
SINKS = RNG.normal(size=HEADS)

CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (10, 3)},
    "causal-window": {"causal": True, "window": (7, None), "q_offset": 3},
    "length": {"key_lengths": 33},
    "lengths": {"key_lengths": np.array([20, 70])},
    "no-keys": {"key_lengths": np.array([0, 70])},
    "offsets": {"causal": True, "q_offset": np.array([0, -5])},
    "segments": {"segment_ids": tuple(np.sort(RNG.integers(0, 3, (BATCH, n)), axis=-1) for n in (N_Q, N_K))},
    "mask": {"mask": RNG.random((N_Q, N_K)) > 0.5},
    "bias": {"bias": RNG.normal(size=(HEADS, N_Q, N_K))},
    "bias-of-keys": {"bias": RNG.normal(size=(1, N_K)), "causal": True},
    "blocks": {"mask": BLOCKS},
    "prefix": {"mask": pa.prefix_mask([10, 60])},
    "prefix-and-blocks": {"mask": pa.prefix_mask([10, 60]) & BLOCKS},
    "alibi": {"bias": pa.alibi_bias(HEADS)},
    "relative": {"bias": pa.relative_position_bias(RNG.normal(size=(16, HEADS)))},
    "sinks": {"sinks": SINKS, "causal": True, "q_offset": -10},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "dropout": {"dropout": 0.3, "seed": 7},
    "dropout-and-blocks": {"dropout": 0.3, "seed": 7, "causal": True, "mask": BLOCKS},
    "large-scores": {"scale": 60.0, "sinks": 100 * SINKS, "causal": True},
}


def chunked(name, x):
    return da.from_array(x, chunks=CHUNKS[name])


def in_dask(x):
    """Arguments as Dask arrays of one chunk, for the functions that take arrays of one library."""
    if isinstance(x, tuple):
        return tuple(map(in_dask, x))
    return da.from_array(x) if isinstance(x, np.ndarray) else x


def expect_close(got, want, tolerance=1e-11):
    for x, y in zip(got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_one_process(case):
    arguments = CASES[case]
    out, cache = pa.attention_forward(Q, K, V, **arguments)
    grads = pa.attention_backward(DOUT, cache, DLSE)
    if case == "relative":
        arguments = {"bias": pa.relative_position_bias(da.from_array(arguments["bias"].table))}
    q, k, v = (chunked(name, x) for name, x in {"q": Q, "k": K, "v": V}.items())
    lazy, lazy_cache = over_dask.attention_forward(q, k, v, **arguments)
    lazy_grads = over_dask.attention_backward(chunked("dout", DOUT), lazy_cache, da.from_array(DLSE))
    assert lazy.chunks == (*q.chunks[:3], (D_V,))
    assert (lazy_grads.q.chunks, lazy_grads.k.chunks, lazy_grads.v.chunks) == (q.chunks, k.chunks, v.chunks)
    got = dask.compute(lazy, lazy_cache.lse, *lazy_grads)
    expect_close(got, (out, cache.lse, *grads), 1e-10 if case == "large-scores" else 1e-11)


@pytest.mark.parametrize("case", ["lengths", "segments", "mask", "bias", "sinks", "dropout", "offsets"])
def test_dispatch_takes_dask_arrays(case):
    """``pa.attention`` of arrays that are all Dask's: lengths and offsets are known to tasks only."""
    out, cache = pa.attention_forward(Q, K, V, **CASES[case])
    lazy, lazy_cache = pa.attention_forward(
        *(chunked(name, x) for name, x in {"q": Q, "k": K, "v": V}.items()),
        **{name: in_dask(x) for name, x in CASES[case].items()},
    )
    grads = pa.attention_backward(DOUT, cache)
    got = dask.compute(lazy, *pa.attention_backward(chunked("dout", DOUT), lazy_cache))
    expect_close(got, (out, *grads))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float16", 4e-3)])
def test_narrow_floats_are_summed_in_float32(dtype, tolerance):
    q, k, v, dout = (x.astype(dtype) for x in (Q, K, V, DOUT))
    out, cache = pa.attention_forward(*(x.astype("float64") for x in (q, k, v)), causal=True)
    grads = pa.attention_backward(dout.astype("float64"), cache)
    lazy, lazy_cache = over_dask.attention_forward(chunked("q", q), chunked("k", k), chunked("v", v), causal=True)
    got = dask.compute(lazy, *over_dask.attention_backward(chunked("dout", dout), lazy_cache))
    assert {x.dtype for x in got if x is not None} == {np.dtype(dtype)}
    expect_close(got, (out, *grads), tolerance)


def test_broadcast_batches_and_one_key_head():
    q, k, v = RNG.normal(size=(3, 4, 20, 8)), RNG.normal(size=(1, 30, 8)), RNG.normal(size=(3, 1, 30, 8))
    dout = RNG.normal(size=q.shape)
    out, cache = pa.attention_forward(q, k, v, causal=True)
    grads = pa.attention_backward(dout, cache)
    lazy_q, lazy_dout = (da.from_array(x, chunks=(2, 2, 7, 8)) for x in (q, dout))
    lazy_v = da.from_array(v, chunks=(2, 1, 11, 8))
    lazy, lazy_cache = over_dask.attention_forward(lazy_q, da.from_array(k, chunks=(1, 11, 8)), lazy_v, causal=True)
    expect_close(dask.compute(lazy, *over_dask.attention_backward(lazy_dout, lazy_cache)), (out, *grads))


def test_arrays_of_two_axes_are_one_head():
    q, k, v = Q[0, 0], K[0, 0], V[0, 0]
    lazy = over_dask.attention(*(da.from_array(x, chunks=(20, -1)) for x in (q, k, v)))
    assert lazy.chunks == ((20, 20, 10), (D_V,))
    np.testing.assert_allclose(lazy, pa.attention(q, k, v), rtol=1e-11, atol=1e-11)


def test_chunks_of_torch_are_computed_by_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    seen = []

    def tensors(x):
        return x.map_blocks(torch.from_numpy, meta=x._meta)

    def back(x):
        seen.append(type(x))
        return x.numpy()

    out = over_dask.attention(*(tensors(chunked(name, x)) for name, x in {"q": Q, "k": K, "v": V}.items()))
    got = out.map_blocks(back, meta=out._meta).compute(scheduler="synchronous")
    np.testing.assert_allclose(got, pa.attention(Q, K, V), rtol=1e-11)
    assert set(seen) == {torch.Tensor}


# ---- the graph -----------------------------------------------------------------------------------------------------


def cells(x, name="attention-part"):
    """The cells of which a graph has a task, as (query chunk, key chunk)."""
    return {key[-2:] for key in dict(x.dask) if isinstance(key, tuple) and str(key[0]).startswith(f"{name}-")}


def long(n, **chunks):
    """Arrays that are never computed: 2**40 of their elements would not fit into memory."""
    return [da.zeros((n, 64), chunks=(chunks.get(name, n // 8), 64)) for name in "qkv"]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({}, lambda i, j: True),
        ({"causal": True}, lambda i, j: j <= i),
        ({"window": (0, 0)}, lambda i, j: i == j),
        ({"key_lengths": 2**37 + 1}, lambda i, j: j <= 1),
        ({"key_lengths": np.int64(2**37)}, lambda i, j: j == 0),
        ({"mask": pa.block_mask(np.eye(8, dtype=bool)[::-1], 2**37)}, lambda i, j: i + j == 7),
        ({"mask": pa.prefix_mask(2**37), "window": (None, None)}, lambda i, j: j <= max(i, 0)),
    ],
    ids=["all", "causal", "window", "length", "length-of-a-chunk", "blocks", "prefix"],
)
def test_excluded_cells_have_no_task(arguments, kept):
    out, cache = over_dask.attention_forward(*long(2**40), **arguments)
    want = {(i, j) for i in range(8) for j in range(8) if kept(i, j)}
    assert cells(out) == want
    grads = over_dask.attention_backward(out, cache)
    assert cells(grads.q, "attention-gradients") == want


@pytest.mark.parametrize("split_every", [2, 4, 8])
def test_no_task_merges_more_than_split_every(split_every):
    out = over_dask.attention(*long(2**20, k=2**14, v=2**14), split_every=split_every)
    tasks = dict(out.dask)
    merges = [task for key, task in tasks.items() if str(key[0]).startswith(("attention-merge", "attention-rows"))]
    assert max(len(task.dependencies) for task in merges) == split_every


def test_a_result_is_not_larger_than_its_inputs():
    """Every task of forward and backward, by the sizes of the arrays that it returns and takes."""
    lazy = [chunked(name, x) for name, x in {"q": Q, "k": K, "v": V}.items()]
    out, cache = over_dask.attention_forward(*lazy, causal=True)
    grads = over_dask.attention_backward(chunked("dout", DOUT), cache)
    tasks = {key: task for x in (out, *grads[:3]) for key, task in dict(x.dask).items()}
    values = {}

    def size(x):
        if isinstance(x, np.ndarray):
            return x.nbytes
        return sum(map(size, x)) if isinstance(x, tuple | list) else 0

    def value(key):
        if key not in values:
            task = tasks[key]
            if isinstance(task, np.ndarray):
                return task
            values[key] = task({name: value(name) for name in task.dependencies})
            if str(key[0]).startswith("attention"):
                assert size(values[key]) <= sum(size(value(name)) for name in task.dependencies)
        return values[key]

    for x in (out, *grads[:3]):
        for index in np.ndindex(*x.numblocks):
            value((x.name, *index))
    assert sum(str(key[0]).startswith("attention-gradients") for key in values) > 10


# ---- bad input -----------------------------------------------------------------------------------------------------


def of(shape, chunks):
    return da.zeros(shape, chunks=chunks)


UNKNOWN = of((8, 4), 4)[of((8,), 4) > 0]

BAD = {
    "no-dask-array": ((Q, Q, Q), {}, pa.BackendMismatchError, r"dask.array.from_array\(q, chunks="),
    "unknown": ((of((8, 4), 4), UNKNOWN, UNKNOWN), {}, pa.ShapeError, r"k.compute_chunk_sizes\(\)"),
    "keys": ((of((8, 4), 4), of((8, 4), 4), of((8, 4), (2, 4))), {}, pa.ShapeError, r"v.rechunk\({-2: \(4, 4\)}\)"),
    "features": ((of((8, 4), (4, 2)), of((8, 4), 4), of((8, 4), 4)), {}, pa.ShapeError, r"q.rechunk\({-1: \(4,\)}\)"),
    "heads": ((of((4, 8, 4), (3, 4, 4)), *[of((2, 8, 4), (1, 4, 4))] * 2), {}, pa.ShapeError,
              r"q.rechunk\({-3: \(2, 2\)}\)"),
    "batch": ((of((4, 2, 8, 4), (2, 2, 4, 4)), *[of((4, 2, 8, 4), (4, 2, 4, 4))] * 2), {}, pa.ShapeError,
              r"k.rechunk\({-4: \(2, 2\)}\)"),
    "empty": ((of((8, 4), 4), *[of((8, 4), ((4, 0, 4), 4))] * 2), {}, pa.ShapeError, r"k.rechunk\({-2: \(4, 4\)}\)"),
    "blocks": ((of((8, 4), (3, 4)), *[of((8, 4), 4)] * 2), {"mask": pa.block_mask(np.ones((4, 2), bool), (2, 4))},
               pa.ShapeError, "rechunk the queries to a multiple of 2"),
    "kernel": ([of((8, 4), 4)] * 3, {"kernel": "tiled"}, pa.ArgumentError, "kernel: .*leave it out"),
    "backend": ([of((8, 4), 4)] * 3, {"backend": "torch"}, pa.ArgumentError, "backend: .*map_blocks"),
    "split": ([of((8, 4), 4)] * 3, {"split_every": 1}, pa.ArgumentError, "split_every: .*at least 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_with_the_remedy(case):
    arrays, arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        over_dask.attention(*arrays, **arguments)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias"])
def test_dispatch_names_an_array_of_unknown_sizes(name):
    arrays = dict.fromkeys("qkv", Q) | {name: UNKNOWN if name in "qkv" else of((8, 8), 4)[of((8,), 4) > 0]}
    if name == "mask":
        arrays["mask"] = arrays["mask"] > 0
    with pytest.raises(pa.BackendMismatchError, match=rf"{name}: .*compute_chunk_sizes\(\)"):
        pa.attention(**arrays)
