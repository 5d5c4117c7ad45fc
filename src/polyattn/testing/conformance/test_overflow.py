"""Scores beyond the range of the dtype: where inputs and the exact result are finite, so is ours.

What is expected is the formula in NumPy's extended precision, whose range no score here leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyattn as pa

from ..compare import assert_close
from ..features import need
from ..target import Target

SIZES = {"float32": 1e19, "float64": 6e153, "bfloat16": 1e19}
"""The square of these, times four features and a scale of one half, is beyond the dtype."""
MOST = {"float32": 3e38, "float64": 1.5e308, "bfloat16": 3e38}


def hot(n_k: int) -> list[list[float]]:
    """Return keys of which the first matches."""
    return [[1.0] * 4, *([0.0] * 4 for _ in range(n_k - 1))]


CASES: dict[str, dict[str, Any]] = {
    "one key": {"k": hot(2)},
    "one of 300": {"k": hot(300)},
    "one of 1500": {"k": hot(1500)},
    "two alike": {"k": [[1.0] * 4, [0.0] * 4, [1.0] * 4]},
    "all below": {"k": [[-2.0] * 4, [-1.0] * 4, [-2.0] * 4]},
    "all below, alike": {"k": [[-1.0] * 4, [-1.0] * 4, [-2.0] * 4]},
    "opposite signs": {"q": [[1.0, -1.0, 1.0, -1.0]], "k": [[3.0, 3.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0]]},
    "rows far apart": {"q": [[1.0] * 4, [1e-19] * 4, [0.0] * 4], "k": hot(3)},
    "a softcap": {"k": hot(3), "softcap": 5.0},
    "sinks": {"k": hot(3), "sinks": [3.0]},
    "sinks above": {"k": [[-1.0] * 4, [-2.0] * 4], "sinks": [3.0]},
    "a bias": {"k": [[1.0] * 4, [1.0] * 4, [0.0] * 4], "bias": [[0.0, -1.0, 5.0]]},
    "causal": {"q": [[1.0] * 4] * 3, "k": hot(3), "causal": True},
    "an excluded key": {"k": [[1.0] * 4, [-1.0] * 4, [9.0] * 4], "mask": [[True, True, False]]},
}


def formula(q: Any, k: Any, v: Any, dout: Any, **given: Any) -> dict[str, Any]:
    """Return out, the weights and the gradients in extended precision."""
    wide = np.longdouble
    q, k, v, dout = (np.asarray(x, wide) for x in (q, k, v, dout))
    scale, softcap = wide(given.get("scale", 0.5)), given.get("softcap")
    capped = scores = q @ k.T * scale
    if softcap is not None:
        capped = scores = np.tanh(scores / wide(softcap)) * wide(softcap)
    scores = scores + np.asarray(given.get("bias", 0.0), wide)
    allowed = np.asarray(given.get("mask", True))
    if given.get("causal"):
        allowed = np.arange(len(k)) <= np.arange(len(q))[:, None] + len(k) - len(q)
    scores = np.where(allowed, scores, -np.inf)
    sinks = np.asarray(given.get("sinks", [-np.inf]), wide)
    largest = np.maximum(scores.max(axis=-1, keepdims=True), sinks)
    exp, of_sink = np.exp(scores - largest), np.exp(sinks - largest)
    total = exp.sum(axis=-1, keepdims=True) + of_sink
    weights = exp / total
    dweights = np.where(allowed, dout @ v.T, 0)
    mean = (weights * dweights).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - mean)
    ds = dscores * scale * (1 if softcap is None else 1 - (capped / wide(softcap)) ** 2)
    return {
        "out": weights @ v, "weights": weights, "q": ds @ k, "k": ds.T @ q, "v": weights.T @ dout,
        "bias": dscores, "sinks": -(of_sink / total * mean).sum(keepdims=True)[0],
    }  # fmt: skip


def arrays_of(case: dict[str, Any], dtype: str, make: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return q, k, v and dout of the library, and the arguments."""
    size, rng = SIZES[dtype], np.random.default_rng(3)
    q, k = (np.asarray(case.get(name, [[1.0] * 4])) * size for name in ("q", "k"))
    v, dout = rng.standard_normal((len(k), 2)), rng.standard_normal((len(q), 2))
    v[:2] = np.eye(2)
    given = {name: x for name, x in case.items() if name not in ("q", "k")}
    for name in ("bias", "sinks", "mask"):
        if name in given:
            given[name] = make(np.asarray(given[name]), "bool" if name == "mask" else dtype)
    return [make(x, dtype) for x in (q, k, v, dout)], given


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_scores_beyond_the_range(name: str, dtype: str, target: Target, make: Any, to_np: Any) -> None:
    """The result, the weights and the gradients are those of the formula."""
    if dtype != "float32":
        need(target, dtype)
    case = CASES[name]
    arrays, given = arrays_of(case, dtype, make)
    hosts = [to_np(x).astype(np.longdouble) for x in arrays]
    with np.errstate(all="ignore"):
        want = formula(*hosts, **{name: x for name, x in case.items() if name not in ("q", "k")})
    check(arrays, given, want, dtype, to_np)


def check(arrays: list[Any], given: dict[str, Any], want: dict[str, Any], dtype: str, to_np: Any, **more: Any) -> None:
    """Compare the result, the weights and the gradients."""
    q, k, v, dout = arrays
    out, cache = pa.attention_forward(q, k, v, **given, **more)
    grads = pa.attention_backward(dout, cache)
    got = {"out": out, "weights": pa.attention_weights(q, k, **given), **grads._asdict()}
    for what, x in got.items():
        if x is not None:
            expected, scale = want[what], None
            if what in "qk":  # differences of what the weights are rounded to, times the other operand
                other = {"q": k, "k": q}[what]
                scale = float(np.abs(to_np(other).astype(np.longdouble)).max()) * 4
            actual = to_np(x).astype(np.longdouble)
            top = np.longdouble(scale or max(float(np.abs(expected).max()), 1e-30))
            assert_close(
                (actual / top).astype(np.float64), (expected / top).astype(np.float64), dtype, scale=1.0, what=what
            )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_operands_at_the_end_of_the_range(dtype: str, target: Target, make: Any, to_np: Any) -> None:
    """Queries, keys and values as large as they can be."""
    if dtype != "float32":
        need(target, dtype)
    most = MOST[dtype]
    q, k = np.full((1, 4), most), np.asarray([[most] * 4, [most] * 4, [-most] * 4])
    v, dout = np.asarray([[most, 1.0], [most, 2.0], [-most, 3.0]]), np.asarray([[0.0, 1.0]])
    arrays = [make(x, dtype) for x in (q, k, v, dout)]
    out = to_np(pa.attention(*arrays[:3])).astype(np.float64)
    np.testing.assert_allclose(out, [[most, 1.5]], rtol=1e-6)
    _, cache = pa.attention_forward(*arrays[:3])
    grads = pa.attention_backward(arrays[3], cache)
    assert_close(to_np(grads.v), [[0.0, 0.5], [0.0, 0.5], [0.0, 0.0]], dtype)


def test_products_beyond_the_range_that_the_scale_brings_back(make: Any, to_np: Any) -> None:
    """A scale so small that the scores fit, though the products of queries and keys do not."""
    q, k = np.full((1, 4), 2.0**64), np.asarray([[2.0**64] * 4, [2.0**64 - 2.0**59] * 4])
    arrays = [make(x, "float32") for x in (q, k, np.eye(2))]
    want = formula(q, k, np.eye(2), np.ones((1, 2)), scale=2.0**-126)
    out = pa.attention(*arrays, scale=2.0**-126)
    assert_close(to_np(out), want["out"].astype(np.float64), "float32")
