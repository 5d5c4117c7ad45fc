"""The native forward of attention: every option, dtype and layout, at the edges of tiles, and what it leaves out."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES
from polyattn_native import _arguments, _kernel, status

pytestmark = [
    pytest.mark.skipif(isinstance(status(), str), reason="there is no native library here"),
    pytest.mark.usefixtures("alone"),
]
DIRECTION = "forward"
"""The method of the generic kernel that the tests forbid."""

Arrays = tuple[np.ndarray, ...]
EDGES = (1, 5, 7, 64, 95, 97, 513)
"""Around the lengths of a panel, of a group of rows, and of a block of keys in forward_chunk.h."""


def normal(*shapes: tuple[int, ...], seed: int = 0, dtype: str = "float64") -> Arrays:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def assert_right(q: Any, k: Any, v: Any, dtype: str, plain: dict[str, Any] | None = None, **arguments: Any) -> None:
    """Compare out and log-sum-exp with the plain kernel on float64; ``plain``: arguments for it alone."""
    out, cache = pa.attention_forward(q, k, v, kernel="native", **arguments)
    assert cache.kernel == "native"
    assert out.dtype == q.dtype
    wide = {name: x.astype("float64") if _is_floating(x) else x for name, x in (arguments | (plain or {})).items()}
    want, want_cache = pa.attention_forward(*(x.astype("float64") for x in (q, k, v)), kernel="plain", **wide)
    assert_close(out, want, dtype, what="out")
    assert_close(cache.lse, want_cache.lse, "float32" if dtype != "float64" else dtype, what="lse")


def _is_floating(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case(case: Any, threads: int) -> None:
    problem = case.problem()
    out, cache = pa.attention_forward(*problem.inputs, kernel="native", **problem.arguments)
    expected = ref.attention(*problem.inputs, **problem.arguments)
    assert_close(out, expected.out.reshape(problem.dout.shape), what="out")
    assert_close(cache.lse, expected.lse.reshape(problem.dlse.shape), what="lse")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("n_q", EDGES)
def test_every_length(n_q: int, dtype: str) -> None:
    for i, n_k in enumerate(EDGES):
        d_k, d_v = ((1, 7), (16, 33), (64, 64), (80, 16))[i % 4]
        q, k, v = normal((2, 4, n_q, d_k), (2, 2, n_k, d_k), (2, 2, n_k, d_v), dtype=dtype)
        assert_right(q, k, v, dtype, causal=i % 2 == 1)


def some(rng: np.random.Generator, chance: float = 0.35) -> bool:
    return bool(rng.random() < chance)


def drawn(rng: np.random.Generator, batch: tuple[int, ...], heads: int, n_q: int, n_k: int) -> dict[str, Any]:
    """Return a random combination of options."""
    arguments: dict[str, Any] = {"causal": some(rng)}
    whole = (*batch, heads, n_q, n_k)
    if some(rng):
        arguments["q_offset"] = int(rng.integers(-9, 40)) if some(rng, 0.5) else rng.integers(-5, 20, batch)
    if some(rng):
        arguments["window"] = tuple(int(rng.integers(0, 60)) if some(rng, 0.7) else None for _ in range(2))
    if some(rng):
        arguments["key_lengths"] = int(rng.integers(0, n_k + 1)) if some(rng, 0.5) else rng.integers(0, n_k + 1, batch)
    if some(rng, 0.2):
        arguments["segment_ids"] = tuple(rng.integers(0, 3, (*batch, n)) for n in (n_q, n_k))
    shapes = [(n_q, n_k), (heads, 1, n_k), (1, n_q, 1), whole]
    masks = [
        lambda: rng.random(shapes[rng.integers(4)]) < 0.7,
        lambda: pa.prefix_mask(int(rng.integers(1, n_k + 2))),
        lambda: pa.block_mask(rng.random((heads, -(-n_q // 16), -(-n_k // 16))) < 0.5, block_size=16),
    ]
    biases = [
        lambda: normal(shapes[rng.integers(4)], seed=1)[0],
        lambda: pa.alibi_bias(heads),
        lambda: pa.relative_position_bias(normal((32, heads))[0]),
    ]
    if some(rng):
        arguments["mask"] = masks[rng.integers(3)]()
    if some(rng):
        arguments["bias"] = biases[rng.integers(3)]()
    if some(rng):
        arguments["softcap"] = float(rng.choice([1.0, 20.0]))
    if some(rng):
        arguments["sinks"] = normal((heads,))[0]
    if some(rng, 0.2):
        arguments |= {"dropout": 0.3, "seed": int(rng.integers(2**62))}
    return arguments


@pytest.mark.parametrize("seed", range(60))
def test_combinations_of_options(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(_kernel, "threads_of", lambda problem: int(rng.integers(1, 4)))
    kv_heads, groups, n_q, n_k, d_k, d_v = (
        int(rng.choice(x)) for x in ((1, 2), (1, 3), EDGES, EDGES, (3, 16), (8, 33))
    )
    batch = ((), (2,), (2, 3), (1, 2, 1, 1, 2))[rng.integers(4)]
    q, k, v = normal(
        (*batch, kv_heads * groups, n_q, d_k), (*batch, kv_heads, n_k, d_k), (*batch, kv_heads, n_k, d_v), seed=seed
    )
    assert_right(q, k, v, "float64", **drawn(rng, batch, kv_heads * groups, n_q, n_k))


class TestLayouts:
    """Arrays are read through their strides."""

    def test_views(self) -> None:
        q, k, v = normal((2, 70, 4, 16), (3, 140, 16), (2, 2, 16, 70), dtype="float32")
        q, v = q.swapaxes(1, 2), v.swapaxes(-1, -2)[..., ::-1]
        for keys in (
            k[1:, ::2],
            k[:2, 70:0:-1],
            np.broadcast_to(k[0, :1], (2, 70, 16)),
            np.broadcast_to(k[0, 0, 0], k.shape)[:2, :70],
        ):
            assert_right(q, keys, v, "float32", causal=True)

    def test_broadcast_batch_axes(self) -> None:
        q, k, v = normal((2, 3, 4, 9, 8), (3, 2, 11, 8), (2, 1, 2, 11, 8))
        assert_right(q, k, v, "float64")
        assert_right(q[:1], k, v[:1], "float64", key_lengths=np.array([3, 0, 11]))

    def test_misaligned_and_foreign(self) -> None:
        q, k, v = normal((3, 5, 8), (3, 6, 8), (3, 6, 8), dtype="float32")
        for change in (misaligned, lambda x: x.astype(">f4"), frozen):
            assert np.array_equal(pa.attention(change(q), change(k), change(v), kernel="native"), pa.attention(q, k, v))


def misaligned(x: np.ndarray) -> np.ndarray:
    copy = np.empty(x.nbytes + 1, dtype=np.uint8)[1:].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def frozen(x: np.ndarray) -> np.ndarray:
    copy = x.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("arguments", [{}, {"sinks": [0.5, 1.0, 2.0]}], ids=str)
def test_results_have_the_order_of_axes_of_the_inputs(library: str, arguments: dict[str, Any]) -> None:
    # Heads that are a view of the features can be joined again without a copy.
    xp: Any = pytest.importorskip(library)
    from_np, to_np = (np.asarray, np.asarray) if xp is np else (xp.from_numpy, xp.Tensor.numpy)
    heads = [x.reshape(2, 5, 3, 4).swapaxes(1, 2) for x in normal(*[(2, 5, 12)] * 4)]
    arguments = {name: xp.asarray(x) for name, x in arguments.items()}
    results = []
    for inputs in (heads, [x.copy() for x in heads]):
        q, k, v, dout = map(from_np, inputs)
        out, cache = pa.attention_forward(q, k, v, kernel="native", **arguments)
        grads = pa.attention_backward(dout, cache)
        results.append([to_np(x) for x in (out, grads.q, grads.k, grads.v)])
    for x, want in zip(*results, strict=True):
        assert x.swapaxes(1, 2).flags.c_contiguous
        np.testing.assert_array_equal(x, want)


class TestFewRows:
    """One query, or a few, on many keys: the keys are split among the threads."""

    @pytest.mark.parametrize("n_q", [1, 4, 5, 16])
    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
    def test_splits(self, n_q: int, dtype: str, threads: int) -> None:
        q, k, v = normal((1, 2, n_q, 24), (1, 1, 3001, 24), (1, 1, 3001, 20), dtype=dtype)
        assert_right(q, k, v, dtype, causal=True)
        assert_right(q, k, v, dtype, key_lengths=2000, sinks=normal((2,), dtype=dtype)[0])
        assert_right(q, k, v, dtype, window=(40, None), causal=True)

    @pytest.mark.parametrize("d_v", [1, 40, 64, 130, 300])
    @pytest.mark.parametrize("n_q", [1, 2, 3])
    def test_numbers_of_features(self, n_q: int, d_v: int) -> None:
        q, k, v = normal((2, n_q, 9), (2, 70, 9), (2, 70, d_v))
        for dtype in ("float32", "float64"):
            assert_right(*(x.astype(dtype) for x in (q, k, v)), dtype)

    def test_values_beyond_the_length_are_not_read(self, threads: int) -> None:
        q, k, v = normal((1, 2, 1, 16), (1, 2, 2000, 16), (1, 2, 2000, 16), dtype="float32")
        want = pa.attention(q, k[..., :1200, :], v[..., :1200, :])
        k[..., 1200:, :] = v[..., 1200:, :] = np.nan
        assert_close(pa.attention(q, k, v, key_lengths=1200), want, "float32")


class TestDoubt:
    """What is not finite, or may overflow, is left to the generic kernel."""

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("which", range(3))
    def test_excluded_keys(self, which: int, value: float, generic: None) -> None:
        inputs = normal((1, 9, 8), (1, 70, 8), (1, 70, 8), dtype="float32")
        mask = np.ones((9, 70), dtype=bool)
        inputs[which][0, 3, 2] = value
        mask[3 if which == 0 else slice(None), slice(None) if which == 0 else 3] = False
        want = ref.attention(*inputs, mask=mask).out
        assert_close(pa.attention(*inputs, mask=mask, kernel="native"), want, "float32")
        assert_close(pa.attention(*inputs, kernel="native"), ref.attention(*inputs).out, "float32")

    @pytest.mark.parametrize("size", [1e19, 5e37, 1e-30])
    def test_extreme_numbers(self, size: float, generic: None) -> None:
        q, k, v = normal((1, 4, 8), (1, 6, 8), (1, 6, 8), dtype="float32")
        for inputs in ((q * size, k, v), (q, k * size, v), (q * size, k / size, v), (q, k, v.clip(-1, 1) * size)):
            arrays = [x.astype("float32") for x in inputs]
            assert_close(pa.attention(*arrays, kernel="native"), ref.attention(*arrays).out, "float32")

    def test_a_bias_at_the_end_of_the_range(self, generic: None) -> None:
        q, k, v = normal((1, 4, 8), (1, 6, 8), (1, 6, 8), dtype="float32")
        for value in (np.finfo("float32").min, -np.inf):
            bias = np.zeros((4, 6), dtype="float32")
            bias[0, :], bias[1:3, 2:] = value, value
            out = pa.attention(q, k, v, bias=bias, kernel="native")
            assert_close(out, pa.attention(q, k, v, bias=bias, kernel="plain"), "float32")

    def test_scores_that_are_large(self) -> None:
        q, k, v = normal((1, 40, 16), (1, 60, 16), (1, 60, 16))
        q *= 300
        q, k, v = (x.astype("float32") for x in (q, k, v))
        _, cache = pa.attention_forward(q, k, v, kernel="native")
        want = ref.attention(*(x.astype("float64") for x in (q, k, v))).lse
        exact = sum(x.astype("float64") for x in cache.row_statistics)  # the two numbers have more digits than one
        assert np.all(np.abs(exact - want) <= 5e-7 * np.abs(want).max())


class TestThreads:
    """Threads change no bit, and calls at once do not meet."""

    @pytest.mark.parametrize("shape", [(8, 200, 16), (1, 900, 64)])
    def test_results_repeat(self, shape: tuple[int, ...], threads: int) -> None:
        q, k, v = normal(shape, shape, shape, dtype="float32")
        first = pa.attention(q, k, v, causal=True)
        assert all(np.array_equal(pa.attention(q, k, v, causal=True), first) for _ in range(5))

    def test_calls_from_many_threads_at_once(self, threads: int) -> None:
        problems = [normal(*[(4, 60 + 20 * i, 16)] * 3, dtype="float32") for i in range(8)]
        want = [pa.attention(*problem) for problem in problems]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: pa.attention(*problems[i % 8]), range(80)))
        assert all(np.array_equal(x, want[i % 8]) for i, x in enumerate(found))

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
    @pytest.mark.parametrize("number", ["1", "3"])
    def test_after_fork(self, program: Any, number: str) -> None:
        program("fork_after_native", number)

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
    def test_no_memory(self, program: Any) -> None:
        program("native_without_memory", POLYATTN_NUM_THREADS="1")


class TestLargeSizes:
    """Elements and positions beyond 2**31."""

    @pytest.mark.skipif(sys.platform == "win32", reason="zeros that nothing has written take memory there")
    def test_elements(self) -> None:
        q, last = normal((1, 1, 64), (1, 6, 64), dtype="float16")
        k = np.zeros((1, 2**25 + 8, 64), dtype="float16")
        k[:, -6:] = last
        out = pa.attention(q, k, k, causal=True, window=(5, 0), kernel="native")
        assert_close(out, pa.attention(q, last, last), "float16")

    def test_positions(self) -> None:
        q, row = normal((1, 2, 8), (1, 1, 8))
        k = np.broadcast_to(row, (1, 2**31 + 5, 8))
        out, cache = pa.attention_forward(q, k, k, causal=True, window=(5, 0), bias=pa.alibi_bias(1), kernel="native")
        want, small = pa.attention_forward(q, k[:, :7], k[:, :7], causal=True, window=(5, 0), bias=pa.alibi_bias(1))
        assert_close(out, want)
        assert_close(cache.lse, small.lse)


class TestSupport:
    """What it supports, and the reasons why not."""

    def test_it_is_chosen(self) -> None:
        q, k, v = normal((2, 3, 4), (2, 5, 4), (2, 5, 4))
        assert pa.attention_forward(q, k, v)[1].kernel == pa.explain(q, k, v).kernel == "native"

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ({"dropout": 1.0}, "keeps or drops all"),
            ({"dropout": 1e-6, "seed": 1}, "keeps or drops all"),
            ({"mask": pa.prefix_mask(2) & pa.prefix_mask(3)}, "one block mask and one prefix mask"),
        ],
        ids=str,
    )
    def test_reasons(self, arguments: dict[str, Any], reason: str) -> None:
        q, k, v = normal((2, 3, 4), (2, 5, 4), (2, 5, 4))
        with pytest.raises(pa.KernelUnsupportedError, match=reason):
            pa.attention(q, k, v, kernel="native", **arguments)

    def test_no_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_arguments, "missing", lambda: "it is not built")
        q, k, v = normal((2, 3, 4), (2, 5, 4), (2, 5, 4))
        assert pa.attention_forward(q, k, v)[1].kernel == "direct"
        with pytest.raises(pa.KernelUnsupportedError, match="not built"):
            pa.attention(q, k, v, kernel="native")

    def test_more_batch_axes_than_the_library_has(self) -> None:
        q, k, v = normal((1, 2, 1, 2, 2, 1, 3, 4, 2), (2, 5, 2), (2, 5, 2))
        q = q[..., :2, :, :]
        assert_right(q, k, v, "float64")
        with pytest.raises(pa.KernelUnsupportedError, match="more than 4 axes"):
            pa.attention(np.zeros((2, 2, 2, 2, 2, 1, 3, 2)), k[:1], v[:1], kernel="native")
