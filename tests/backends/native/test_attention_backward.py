"""The native backward of attention: every option and dtype, at the edges of tiles, against other computations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES as EVERY_CASE
from polyattn.testing.compare import central_differences
from polyattn_native import status

pytestmark = [
    pytest.mark.skipif(isinstance(status(), str), reason="there is no native library here"),
    pytest.mark.usefixtures("alone"),
]
DIRECTION = "backward"
"""The method of the generic kernel that the tests forbid."""

Arrays = tuple[np.ndarray, ...]
CASES = [case for case in EVERY_CASE if case.name != "large-scores"]  # which are left to the generic kernel
KEYS, QUERIES = 192, 192
"""The lengths of a tile in backward_tiles.h."""


def normal(*shapes: tuple[int, ...], seed: int = 0, dtype: str = "float64") -> Arrays:
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def gradients(dout: Any, q: Any, k: Any, v: Any, kernel: str = "native", dlse: Any = None, **arguments: Any) -> Any:
    _, cache = pa.attention_forward(q, k, v, kernel=kernel, **arguments)
    assert cache.kernel == kernel
    return pa.attention_backward(dout, cache, dlse)


def assert_same(found: Any, expected: Any, dtype: str = "float64") -> None:
    for name, dx, want in zip(["q", "k", "v", "bias", "sinks"], found, expected, strict=True):
        assert (dx is None) == (want is None)
        if dx is not None:
            scale = max(1.0, float(np.abs(want).max()))  # some are zero but for rounding
            assert_close(dx, np.reshape(want, dx.shape), dtype, scale=scale, what=f"gradient of {name}")


# ---- options -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case(case: Any, dtype: str) -> None:
    problem = case.problem().rounded(np.asarray, lambda x, name: x.astype(name), dtype)
    (q, k, v), arguments = problem.native(lambda x, name: x.astype(name), dtype)
    dlse = problem.dlse.astype("float64" if dtype == "float64" else "float32")
    found = gradients(problem.dout.astype(dtype), q, k, v, dlse=dlse, **arguments)
    names = {"dlse": problem.dlse, **problem.arguments}
    expected = ref.attention_gradients(problem.dout, *problem.inputs, **names)
    assert_same(found, expected, dtype)


def make_of_torch(x: np.ndarray, name: str) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(np.array(x)).to(getattr(torch, name))


def to_np(x: Any) -> np.ndarray:
    return np.asarray(x.to(pytest.importorskip("torch").float64))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_in_bfloat16_of_torch(case: Any) -> None:
    pytest.importorskip("torch")
    problem = case.problem().rounded(to_np, make_of_torch, "bfloat16")
    (q, k, v), arguments = problem.native(make_of_torch, "bfloat16")
    dlse = make_of_torch(problem.dlse, "float32")
    found = gradients(make_of_torch(problem.dout, "bfloat16"), q, k, v, dlse=dlse, **arguments)
    names = {"dlse": problem.dlse, **problem.arguments}
    expected = ref.attention_gradients(problem.dout, *problem.inputs, **names)
    assert_same([None if dx is None else to_np(dx) for dx in found], expected, "bfloat16")


@pytest.mark.parametrize("n", [(1, 1), (40, 67), (193, 391), (389, 200)], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"window": (70, 3), "softcap": 20.0}], ids=str)
def test_bfloat16_at_the_edges_of_tiles(n: tuple[int, int], arguments: dict[str, Any], threads: int) -> None:
    pytest.importorskip("torch")
    wide = normal((2, 2, n[0], 31), (2, 1, n[1], 31), (2, 1, n[1], 17), (2, 2, n[0], 17))
    rounded = [make_of_torch(x, "bfloat16") for x in wide]
    q, k, v, dout = rounded
    expected = gradients(*(to_np(x) for x in (dout, q, k, v)), kernel="plain", **arguments)
    found = gradients(dout, q, k, v, **arguments)
    for name, dx, want in zip("qkv", found[:3], expected[:3], strict=True):
        scale = max(1.0, float(np.abs(want).max()))
        assert_close(to_np(dx), want, "bfloat16", scale=scale, what=f"gradient of {name}")


LENGTHS = (1, 5, 16, 63, 64, 65, KEYS - 1, KEYS, KEYS + 1, QUERIES - 1, QUERIES, QUERIES + 1, 2 * QUERIES + 7)


@pytest.mark.parametrize("n_k", LENGTHS)
@pytest.mark.parametrize("n_q", LENGTHS[::3])
def test_lengths_at_the_edges_of_tiles(n_q: int, n_k: int) -> None:
    q, k, v, dout = normal((2, n_q, 8), (2, n_k, 8), (2, n_k, 5), (2, n_q, 5))
    for arguments in ({}, {"causal": True}, {"window": (70, 3)}):
        assert_same(gradients(dout, q, k, v, **arguments), gradients(dout, q, k, v, kernel="plain", **arguments))


@pytest.mark.parametrize("d_v", [1, 17, 64, 130])
@pytest.mark.parametrize("d_k", [1, 3, 16, 40, 64, 129])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_of_features(d_k: int, d_v: int, dtype: str) -> None:
    wide = normal((2, 50, d_k), (2, 101, d_k), (2, 101, d_v), (2, 50, d_v))
    q, k, v, dout = (x.astype(dtype) for x in wide)
    expected = gradients(*(x.astype("float64") for x in (dout, q, k, v)), kernel="plain")
    assert_same(gradients(dout, q, k, v), expected, dtype)


# Options of attention, by name. Each is a function of a random generator and (items, heads, n_q, n_k).
OPTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "causal": lambda rng, *n: {"causal": True},
    "offset": lambda rng, *n: {"q_offset": int(rng.integers(-20, 90))},
    "offsets": lambda rng, *n: {"q_offset": rng.integers(-20, 90, n[0])},
    "window": lambda rng, *n: {"window": (int(rng.integers(0, 150)), int(rng.integers(0, 150)))},
    "lengths": lambda rng, *n: {"key_lengths": rng.integers(0, n[3] + 1, n[0])},
    "segments": lambda rng, *n: {"segment_ids": tuple(np.sort(rng.integers(0, 4, (n[0], m))) for m in n[2:])},
    "mask": lambda rng, *n: {"mask": rng.random((n[0], 1, n[2], n[3])) < 0.5},
    "mask of keys": lambda rng, *n: {"mask": rng.random((n[0], 1, 1, n[3])) < 0.5},
    "prefix": lambda rng, *n: {"mask": pa.prefix_mask([int(x) for x in rng.integers(0, n[3], n[0])])},
    "blocks": lambda rng, *n: {"mask": pa.block_mask(rng.random((-(-n[2] // 48), -(-n[3] // 32))) < 0.4, (48, 32))},
    "bias": lambda rng, *n: {"bias": rng.standard_normal(n)},
    "bias of heads": lambda rng, *n: {"bias": np.where(rng.random(n[1:]) < 0.1, -np.inf, rng.standard_normal(n[1:]))},
    "bias of keys": lambda rng, *n: {"bias": rng.standard_normal((n[0], 1, 1, n[3]))},
    "bias of queries": lambda rng, *n: {"bias": rng.standard_normal((n[1], n[2], 1))},
    "alibi": lambda rng, *n: {"bias": pa.alibi_bias(n[1])},
    "relative": lambda rng, *n: {"bias": pa.relative_position_bias(rng.standard_normal((16, n[1])))},
    "softcap": lambda rng, *n: {"softcap": 2.0},
    "sinks": lambda rng, *n: {"sinks": rng.standard_normal(n[1])},
    "dropout": lambda rng, *n: {"dropout": 0.3, "seed": int(rng.integers(0, 2**40))},
    "scale": lambda rng, *n: {"scale": -0.4},
}  # fmt: skip


def combination(rng: np.random.Generator, *n: int) -> dict[str, Any]:
    """Return some options that may go together, drawn at random."""
    found: dict[str, Any] = {}
    for name in rng.permutation(list(OPTIONS))[: rng.integers(1, 6)]:
        given = OPTIONS[name](rng, *n)
        if not set(given) & set(found):
            found.update(given)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_in_several_tiles(name: str, threads: int) -> None:
    rng, sizes = np.random.default_rng(3), (2, 4, 2 * QUERIES + 5, 3 * KEYS + 11)
    assert_like_plain(rng, OPTIONS[name](rng, *sizes), *sizes)


@pytest.mark.parametrize("seed", range(16))
def test_combinations_of_options(seed: int, threads: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = tuple(int(rng.integers(1, most)) for most in (3, 5, 420, 420))
    assert_like_plain(rng, combination(rng, *sizes), *sizes)


def assert_like_plain(rng: np.random.Generator, arguments: dict[str, Any], *n: int) -> None:
    """Compare all gradients with those of the plain kernel, also of log-sum-exp, for grouped heads."""
    items, heads, n_q, n_k = n
    kv_heads = int(rng.choice([g for g in (1, 2, heads) if heads % g == 0]))
    shapes = (items, heads, n_q, 9), (items, kv_heads, n_k, 9), (items, kv_heads, n_k, 6), (items, heads, n_q, 6)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    dlse = rng.standard_normal((items, heads, n_q))
    found, expected = (
        gradients(dout, q, k, v, kernel=kernel, dlse=dlse, **arguments) for kernel in ("native", "plain")
    )
    assert_same(found, expected)


# ---- numbers -------------------------------------------------------------------------------------------------------


def test_finite_differences() -> None:
    q, k, v, dout, bias, sinks = normal((2, 3, 3), (1, 4, 3), (1, 4, 2), (2, 3, 2), (2, 3, 4), (2,))
    arguments = {"causal": True, "softcap": 1.3, "scale": 0.7}
    found = gradients(dout, q, k, v, bias=bias, sinks=sinks, **arguments)

    def total(**changed: np.ndarray) -> float:
        given = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, **changed}
        return float((pa.attention(**given, kernel="native", **arguments) * dout).sum())

    for name, x in {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}.items():
        slopes = central_differences(lambda moved, name=name: total(**{name: moved}), x)
        assert np.abs(getattr(found, name) - slopes).max() < 1e-8


@pytest.mark.parametrize("size", [30.0, 60.0, 1e4])
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"softcap": 20.0}, {"bias": True}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("generic")
def test_large_scores(size: float, arguments: dict[str, Any], dtype: str, threads: int) -> None:
    """They are left to the generic kernel; another kernel's statistics do not spoil the gradients."""
    q, k, v, dout = normal((2, 300, 16), (2, 400, 16), (2, 400, 8), (2, 300, 8), dtype=dtype)
    k *= np.asarray(size / np.abs(q @ k.swapaxes(1, 2)).max(), dtype=dtype)
    given = {**arguments, "scale": 1.0}
    if "bias" in arguments:
        given["bias"] = normal((2, 300, 400), seed=1, dtype=dtype)[0]
    wide = {name: np.float64(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    expected = gradients(*(np.float64(x) for x in (dout, q, k, v)), kernel="plain", **wide)
    _, cache = pa.attention_forward(q, k, v, kernel="plain", **given)
    found = pa.attention_backward(dout, replace(cache, kernel="native"))
    error = max(1.0, size * 0.05) * (2e-5 if dtype == "float32" else 1e-12)
    for dx, want in zip(found, expected, strict=True):
        if want is not None:
            assert np.abs(dx - want).max() <= error * np.abs(want).max()


def test_results_repeat_to_the_last_bit(threads: int) -> None:
    q, k, v, dout = normal((2, 3, 400, 24), (2, 1, 500, 24), (2, 1, 500, 24), (2, 3, 400, 24), dtype="float32")
    bias, sinks = normal((3, 1, 500), (3,), dtype="float32")
    runs = [gradients(dout, q, k, v, bias=bias, sinks=sinks, causal=True) for _ in range(3)]
    for run in runs[1:]:
        assert all(np.array_equal(x, y) for x, y in zip(runs[0], run, strict=True))


# ---- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_views(dtype: str) -> None:
    """Strides as they come: heads after rows, negative, of every second element, and 0."""
    shapes = (2, 70, 3, 16), (2, 120, 3, 16), (2, 120, 3, 16), (2, 70, 3, 16)
    wide = [x.astype(dtype) for x in normal(*shapes)]
    q, k, v, dout = (x.swapaxes(1, 2) for x in wide)
    views = {
        "heads after rows": (q, k, v, dout),
        "negative": (q[:, :, ::-1], k[..., ::-1], v[:, ::-1], dout[::-1]),
        "every second": (q[:, :, ::2, ::2], k[:, :, ::2, ::2], v[:, :, ::2], dout[:, :, ::2]),
        "broadcast": (q, k, v, np.broadcast_to(dout[:1, :1, :1, :1], dout.shape)),
        "keys of all items": (q, np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape), dout),
    }
    for name, (q_, k_, v_, dout_) in views.items():
        found = gradients(dout_, q_, k_, v_)
        expected = gradients(*(np.ascontiguousarray(x) for x in (dout_, q_, k_, v_)))
        for dx, want in zip(found[:3], expected[:3], strict=True):
            assert np.array_equal(dx, want), name


def test_a_bias_with_a_gradient_of_every_broadcast(threads: int) -> None:
    q, k, v, dout = normal((2, 3, 210, 4), (2, 3, 230, 4), (2, 3, 230, 4), (2, 3, 210, 4))
    for shape in [(2, 3, 210, 230), (3, 210, 230), (2, 1, 210, 230), (210, 1), (230,), (2, 3, 1, 1), (1, 1, 1, 230)]:
        (bias,) = normal(shape, seed=1)
        found, expected = (gradients(dout, q, k, v, kernel=kernel, bias=bias) for kernel in ("native", "plain"))
        assert_close(found.bias, expected.bias, scale=1.0, what=f"gradient of a bias {shape}")


# ---- numbers that are not finite -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("generic")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_excluded_keys_reach_nothing(poison: float) -> None:
    q, k, v, dout = normal((2, 9, 4), (2, 9, 4), (2, 9, 3), (2, 9, 3))
    mask = np.arange(9) < 6
    clean = gradients(dout, q, k, v, mask=mask)
    k[:, 7], v[:, 8] = poison, poison
    assert_same(gradients(dout, q, k, v, mask=mask), clean)


@pytest.mark.usefixtures("generic")
@pytest.mark.parametrize("which", range(4))
def test_a_nan_is_kept(which: int) -> None:
    arrays = normal((2, 9, 4), (2, 9, 4), (2, 9, 3), (2, 9, 3))
    arrays[which][0, 2, 1] = np.nan
    q, k, v, dout = arrays
    assert_same(gradients(dout, q, k, v, causal=True), gradients(dout, q, k, v, kernel="plain", causal=True))


def test_empty_rows_have_no_gradient() -> None:
    q, k, v, dout = normal((2, 220, 4), (2, 230, 4), (2, 230, 3), (2, 220, 3))
    mask = np.ones((220, 230), dtype=bool)
    mask[100:201] = False
    found = gradients(dout, q, k, v, mask=mask)
    assert not found.q[:, 100:201].any()
    assert_same(found, gradients(dout, q, k, v, kernel="plain", mask=mask))
