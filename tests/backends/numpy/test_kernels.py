"""NumPy's kernels, for every backend of the suite: in tiles, in threads and at the edges of tiles."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES
from polyattn_native import NativeKernel
from polyattn_numpy import _blocked, _layout

Arrays = tuple[np.ndarray, ...]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 2 queries and 4 keys, for three threads however few the machine has: every problem has several tasks."""
    for name, value in (("ROWS", 2), ("COLUMNS", 4), ("SCORES", 8)):
        monkeypatch.setattr(_layout, name, value)
    monkeypatch.setattr(_blocked, "WORTHWHILE", 0)
    monkeypatch.setattr(_blocked, "thread_count", lambda: 3)


def normal(*shapes: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> Arrays:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@pytest.mark.parametrize("kernel", ["direct", "blocked"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case(case: Any, kernel: str, tiny: None) -> None:
    problem = case.problem()
    out, cache = pa.attention_forward(*problem.inputs, kernel=kernel, **problem.arguments)
    grads = pa.attention_backward(problem.dout, cache, problem.dlse)
    expected = ref.attention(*problem.inputs, **problem.arguments)
    slopes = ref.attention_gradients(problem.dout, *problem.inputs, **{"dlse": problem.dlse, **problem.arguments})
    assert cache.kernel == kernel
    assert_close(out, expected.out.reshape(problem.dout.shape), what="out")
    assert_close(cache.lse, expected.lse.reshape(problem.dlse.shape), what="lse")
    for name, gradient in zip(grads._fields, grads, strict=True):
        if gradient is not None:
            assert_close(gradient, np.reshape(getattr(slopes, name), gradient.shape), what=f"gradient of {name}")


@pytest.mark.parametrize(
    ("shape", "arguments", "kernel"),
    [
        ((2, 4, 8, 8), {}, "direct"),
        ((1, 8, 1, 8), {}, "direct"),
        ((2, 4, 300, 8), {}, "blocked"),
        ((2, 4, 300, 8), {"causal": True, "window": (70, None), "softcap": 2.0}, "blocked"),
        ((2, 4, 300, 8), {"dropout": 0.1, "seed": 1}, "blocked"),
        ((2, 4, 8, 8), {"dropout": 0.1, "seed": 1}, "blocked"),
        ((2, 4, 8, 8), {"dropout": 1.0}, "tiled"),
        ((2, 4, 8, 8), {"bias": np.zeros((8, 8))}, "tiled"),
    ],
)
def test_which_kernel_runs(
    shape: tuple[int, ...], arguments: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are left where there is no native library."""
    monkeypatch.setattr(NativeKernel, "supports", lambda self, problem: "there is no library")
    (q,) = normal(shape)
    _, cache = pa.attention_forward(q, q, q, **arguments)
    assert cache.kernel == kernel


def test_a_forced_kernel_says_why_not() -> None:
    (q,) = normal((2, 4, 300, 8))
    with pytest.raises(
        pa.KernelUnsupportedError, match="'direct' does not compute this problem: it is for one query, or"
    ):
        pa.attention(q, q, q, kernel="direct")
    with pytest.raises(
        pa.KernelUnsupportedError, match="a float64 bias of narrower inputs is left to the generic kernel"
    ):
        pa.attention(q, q, q, kernel="blocked", bias=np.zeros(300))


@pytest.mark.parametrize("seed", [0, 7, -(2**40), 2**63, np.int32(-5), np.array(2**32 - 1, dtype=np.uint32)], ids=str)
@pytest.mark.parametrize("heads", [(6, 6), (6, 2)])
def test_dropout_keeps_the_same_weights_as_the_generic_kernel(seed: Any, heads: tuple[int, int], tiny: None) -> None:
    shapes = [(2, h, n, 3) for h, n in zip((heads[0], heads[1], heads[1], heads[0]), (5, 11, 11, 5), strict=True)]
    q, k, v, dout = normal(*shapes, dtype="float64")
    results = []
    for kernel in ("plain", "blocked"):
        arguments = {"dropout": 0.4, "seed": seed, "kernel": kernel, "window": (3, 2), "softcap": 3.0}
        out, cache = pa.attention_forward(q, k, v, **arguments)
        results.append([out, cache.lse, *pa.attention_backward(dout, cache)[:3]])
    for plain, blocked in zip(*results, strict=True):
        assert_close(blocked, plain)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [60.0, 88.0, 1e4])
@pytest.mark.parametrize("outlier", [False, True])
def test_scores_of_any_size(size: float, causal: bool, outlier: bool) -> None:
    """No result overflows in exp: scores of both signs, and one key much larger than the others."""
    q, k, v, dout = normal((2, 300, 16), (2, 600, 16), (2, 600, 8), (2, 300, 8))
    k *= np.float32(size) / np.float32(np.abs(q @ k.swapaxes(1, 2)).max())
    if outlier:
        k *= np.float32(1e-3)
        k[:, 17] *= np.float32(1e3)
    arguments = {"causal": causal, "scale": 1.0}
    out, cache = pa.attention_forward(q, k, v, kernel="blocked", **arguments)
    grads = pa.attention_backward(dout, cache)
    wide = [x.astype(np.float64) for x in (q, k, v, dout)]
    expected = ref.attention(*wide[:3], **arguments)
    slopes = ref.attention_gradients(wide[3], *wide[:3], **arguments)
    error = max(1e-5, size * 1e-6)  # of a score in float32, which its exponential multiplies
    for got, want in ((out, expected.out), *((getattr(grads, x), getattr(slopes, x)) for x in "qkv")):
        assert np.abs(got - want).max() <= error * np.abs(want).max()


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e30])
def test_values_of_any_size(size: float) -> None:
    q, k, v = normal((2, 300, 16), (2, 600, 16), (2, 600, 8))
    v = v * np.float32(size)
    expected = ref.attention(q.astype(np.float64), k.astype(np.float64), v.astype(np.float64)).out
    got = pa.attention(q, k, v, kernel="blocked")
    spacing = float(np.finfo(np.float32).smallest_subnormal)
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max() + 16 * spacing


@pytest.mark.parametrize("shape", [(1, 1, 5, 7), (1, 1, 1, 7), (1, 1, 1, 1)])
def test_a_bias_for_all_entries_with_their_axes(shape: tuple[int, ...], tiny: None) -> None:
    """The batch is then merged with the heads; the gradient has the axes of the bias."""
    q, k, v, dout, bias = normal((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), (2, 3, 5, 4), shape, dtype="float64")
    _, cache = pa.attention_forward(q, k, v, bias=bias, kernel="blocked")
    gradient, slope = pa.attention_backward(dout, cache).bias, ref.attention_gradients(dout, q, k, v, bias=bias).bias
    assert_close(gradient, slope, scale=1.0, what="gradient of bias")  # one number for all scores moves nothing


@pytest.mark.parametrize("kernel", ["direct", "blocked"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_excluded_keys_reach_nothing(kernel: str, poison: float, tiny: None) -> None:
    q, k, v, dout = normal((2, 9, 4), (2, 9, 4), (2, 9, 3), (2, 9, 3), dtype="float64")
    mask = np.ones(9, dtype=bool)
    mask[6:] = False
    clean, cache = pa.attention_forward(q, k, v, mask=mask, kernel=kernel)
    slopes = pa.attention_backward(dout, cache)
    k[:, 7], v[:, 8] = poison, poison
    out, cache = pa.attention_forward(q, k, v, mask=mask, kernel=kernel)
    assert_close(out, clean)
    for got, want in zip(pa.attention_backward(dout, cache)[:3], slopes[:3], strict=True):
        assert_close(got, want)
    v[:, 2] = np.nan
    assert np.isnan(pa.attention(q, k, v, mask=mask, kernel=kernel)).all()


@pytest.mark.parametrize("kernel", ["direct", "blocked"])
def test_rows_whose_scores_are_all_minus_infinity_are_not_empty_rows(kernel: str, tiny: None) -> None:
    q, k, v = np.ones((1, 2, 1)), np.full((1, 3, 1), -np.inf), np.ones((1, 3, 1))
    out = pa.attention(q, k, v, mask=np.array([[True] * 3, [False] * 3]), kernel=kernel)
    assert np.isnan(out[0, 0, 0])
    assert out[0, 1, 0] == 0


@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (40, 40)}], ids=str)
def test_bitwise_repeatable(arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on the assignment of tasks to threads, nor on the layout of the arrays."""
    monkeypatch.setattr(_blocked, "WORTHWHILE", 0)
    monkeypatch.setattr(_blocked, "thread_count", lambda: 3)
    q, k, v, dout = normal(*[(1, 3, 600, 16)] * 4)

    def run() -> list[np.ndarray]:
        out, cache = pa.attention_forward(q, k, v, kernel="blocked", **arguments)
        return [out, cache.lse, *pa.attention_backward(dout, cache)[:3]]

    first = run()
    for _ in range(5):
        assert all(np.array_equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("layout", ["transposed", "reversed", "strided", "read-only", "broadcast"])
def test_any_layout_and_inputs_are_never_written(layout: str) -> None:
    change: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "transposed": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
        "reversed": lambda x: x[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
        "strided": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
        "read-only": lambda x: x,
        "broadcast": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
    }
    q, k, v, dout = (change[layout](x) for x in normal(*[(2, 3, 300, 8)] * 4))
    before = [x.copy() for x in (q, k, v, dout)]
    for x in (q, k, v, dout):
        x.flags.writeable = False
    out, cache = pa.attention_forward(q, k, v, causal=True, kernel="blocked")
    grads = pa.attention_backward(dout, cache)
    packed = [x.copy() for x in (q, k, v)]
    want, cache = pa.attention_forward(*packed, causal=True, kernel="plain")
    for a, b in zip((out, *grads[:3]), (want, *pa.attention_backward(dout.copy(), cache)[:3]), strict=True):
        assert_close(a, b, "float32", scale=1.0)  # equal keys: their gradients cancel
    assert all(np.array_equal(a, b) for a, b in zip(before, (q, k, v, dout), strict=True))


def beyond_results(n: int) -> tuple[int, int]:
    """Return the bytes that forward and backward hold at most, beyond their inputs and results."""
    q, k, v, dout = normal(*[(1, 2, n, 32)] * 4)
    peaks = []
    tracemalloc.start()
    try:
        out, cache = pa.attention_forward(q, k, v, causal=True)
        peaks.append(tracemalloc.get_traced_memory()[1] - out.nbytes - cache.lse.nbytes)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        grads = pa.attention_backward(dout, cache)
        peaks.append(tracemalloc.get_traced_memory()[1] - before - sum(dx.nbytes for dx in grads[:3]))
    finally:
        tracemalloc.stop()
    return peaks[0], peaks[1]


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    with threadpool_limits(1, user_api="blas"):  # when the threads of several are at their peak is left to chance
        small, large = beyond_results(4096), beyond_results(8192)
    for n, twice in zip(small, large, strict=True):
        assert twice <= 2.2 * n
        assert twice < 8192 * 8192 * 4 / 8  # the scores of one head, and yet an eighth of them


@pytest.mark.parametrize("n_q", [2, 300])
def test_out_of_memory_names_the_size(n_q: int) -> None:
    q, k = normal((n_q, 4), (300, 4))
    v = np.broadcast_to(np.float32(1), (300, 2**44))
    with pytest.raises(MemoryError, match=r"Unable to allocate .* [TP]iB for an array with shape"):
        pa.attention(q, k, v)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "dout", "dlse"])
@pytest.mark.parametrize("kernel", ["direct", "blocked", "tiled", "plain", None])
def test_the_other_byte_order(name: str, kernel: str | None) -> None:
    """Numbers of 64 bits keep their digits, whatever the order of their bytes."""
    rng = np.random.default_rng(14)
    shapes = {
        "q": (2, 3, 4),
        "k": (2, 5, 4),
        "v": (2, 5, 3),
        "bias": (3, 5),
        "sinks": (2,),
        "dout": (2, 3, 3),
        "dlse": (2, 3),
    }
    host = {of: rng.standard_normal(shape) for of, shape in shapes.items()}
    given = {of: x.astype(">f8") if of == name else x for of, x in host.items()}
    dout, dlse = given.pop("dout"), given.pop("dlse")
    try:
        out, cache = pa.attention_forward(**given, kernel=kernel)
    except pa.KernelUnsupportedError:
        return
    of = {key: host[key] for key in ("bias", "sinks")}
    assert_close(out, ref.attention(host["q"], host["k"], host["v"], **of).out)
    slopes = ref.attention_gradients(host["dout"], host["q"], host["k"], host["v"], dlse=host["dlse"], **of)
    for key, gradient in pa.attention_backward(dout, cache, dlse)._asdict().items():
        assert_close(gradient, getattr(slopes, key), what=f"gradient of {key}")


def test_a_bias_of_64_bits_in_the_other_byte_order() -> None:
    """It is limited to the range of float32 scores."""
    q, bias = np.ones((2, 4), np.float32), np.array([1.0, 1e300])
    np.testing.assert_array_equal(
        pa.attention(q, q, q, bias=bias.astype(">f8"), kernel="plain"), pa.attention(q, q, q, bias=bias, kernel="plain")
    )
