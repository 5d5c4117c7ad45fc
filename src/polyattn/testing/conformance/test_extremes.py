"""Extreme arguments: large positions, every integer type, large and tiny numbers."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(83)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
Q, K, V = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((2, 5, 4)), RNG.standard_normal((2, 5, 3))


def gradients(make: Any, to_np: Any, dout: Any, dtype: Any = "float64", **arguments: Any) -> Any:
    """Return ``(out, lse, gradients)`` on the host for Q, K and V."""
    out, cache = pa.attention_forward(make(Q, dtype), make(K, dtype), make(V, dtype), **arguments)
    grads = pa.attention_backward(make(dout, dtype), cache)
    return to_np(out), to_np(cache.lse), {name: None if x is None else to_np(x) for name, x in grads._asdict().items()}


@pytest.mark.parametrize("offset", [2**31 - 2, 2**29, -(2**29), -(2**31)])
@pytest.mark.parametrize("kind", ["static", "int32", "int64"])
def test_far_positions(make: Any, to_np: Any, offset: Any, kind: Any) -> None:
    """Positions do not wrap around: a query far after the keys attends to all of them, far before them to none."""
    q_offset = offset if kind == "static" else make(offset, kind)
    windows: Any = [(None, 0), (None, 2**28)] + ([(2**31 + 5, 2**28)] if kind == "static" else [])
    for window in windows:
        out = to_np(pa.attention(make(Q), make(K), make(V), q_offset=q_offset, window=window))
        want = ref.attention(Q, K, V).out if offset > 0 else np.zeros(out.shape)
        assert_close(out, want, what=f"window {window}")


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_every_type(make: Any, to_np: Any, kind: Any) -> None:
    offsets, lengths, ids = np.array([1, 2]), np.array([5, 3]), (np.array([0, 0, 1]), np.array([0, 0, 0, 1, 1]))
    host: Any = {"causal": True, "q_offset": offsets, "key_lengths": lengths, "segment_ids": ids}
    native: Any = {
        "causal": True,
        "q_offset": make(offsets, kind),
        "key_lengths": make(lengths, kind),
        "segment_ids": tuple(make(x, kind) for x in ids),
    }
    heads = [x[:, None] for x in (Q, K, V)]
    assert_close(to_np(pa.attention(*(make(x) for x in heads), **native)), ref.attention(*heads, **host).out)


@pytest.mark.parametrize(
    ("kind", "seed"),
    [("int8", -3), ("uint8", 200), ("uint16", 60000), ("int32", -7), ("uint32", 2**31 + 5), ("int64", -(2**40) - 1),
     ("uint64", 2**63 + 2**33 + 5)],
)  # fmt: skip
def test_a_seed_is_its_value(make: Any, to_np: Any, kind: Any, seed: Any) -> None:
    """The dropout mask is the same for a seed as a Python integer and as an array of any integer type."""
    inputs = [make(x) for x in (Q, K, V)]
    of_array, of_number = (pa.attention(*inputs, dropout=0.5, seed=s) for s in (make(seed, kind), seed))
    np.testing.assert_array_equal(to_np(of_array), to_np(of_number))


@pytest.mark.parametrize("kind", INTEGERS)
def test_labels_of_every_type(make: Any, to_np: Any, kind: Any) -> None:
    """There are more classes than the type can represent, and ``ignore_index`` is outside of its range."""
    logits, labels = RNG.standard_normal((3, 300)), np.array([44, 100, 1])
    loss, cache = F.cross_entropy_forward(make(logits), make(labels, kind), ignore_index=-100)
    assert_close(to_np(loss), ref.cross_entropy(logits, labels))
    dlogits = F.cross_entropy_backward(make(1.0), cache).logits
    assert_close(to_np(dlogits), ref.cross_entropy_gradient(1.0, logits, labels))


def test_ignored_samples_reach_nothing(make: Any, to_np: Any) -> None:
    """NaN in ignored logits has no effect; if all samples are ignored, the mean is NaN and the gradient is zero."""
    logits = RNG.standard_normal((2, 3))
    clean = ref.cross_entropy_gradient(1.0, logits, [1, 2], ignore_index=1)
    logits[0] = np.nan
    loss, cache = F.cross_entropy_forward(make(logits), make([1, 2], "int64"), ignore_index=1)
    assert_close(to_np(loss), ref.cross_entropy(logits[1:], [2]))
    assert_close(to_np(F.cross_entropy_backward(make(1.0), cache).logits), clean)
    loss, cache = F.cross_entropy_forward(make(logits), make([1, 1], "int64"), ignore_index=1)
    assert np.isnan(to_np(loss))
    np.testing.assert_array_equal(to_np(F.cross_entropy_backward(make(1.0), cache).logits), np.zeros((2, 3)))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_where_a_cube_overflows(make: Any, to_np: Any, approximate: Any) -> None:
    x = make([1e20, -1e20, 1e13, -1e13, 3e38, -3e38], "float32")
    y, cache = F.gelu_forward(x, approximate=approximate)
    np.testing.assert_array_equal(to_np(y), np.maximum(to_np(x), 0))
    np.testing.assert_array_equal(to_np(F.gelu_backward(make(np.ones(6), "float32"), cache).x), [1, 0, 1, 0, 1, 0])


def run(name: Any, make: Any, to_np: Any, dtype: Any, *hosts: Any, **options: Any) -> Any:
    """Return the value and the gradients of an operation on the host for an upstream of ones."""
    y, cache = getattr(F, f"{name}_forward")(*(make(x, dtype) for x in hosts), **options)
    grads = getattr(F, f"{name}_backward")(make(np.ones(y.shape), dtype), cache)
    return to_np(y), *(to_np(gradient) for gradient in grads if gradient is not None)


def test_silu_far_out(make: Any, to_np: Any) -> None:
    """Tiny values are accurate to the last digits, and neither the value nor the derivative overflows."""
    x = np.array([-700.0, -40.0, -20.0, 0.0, 20.0, 700.0])
    y, dx = run("silu", make, to_np, "float64", x)
    for value, slope, *at in zip(y, dx, x, ref.silu(x), ref.silu_gradient(np.ones(6), x), strict=True):
        assert_close([value], [at[1]], what=f"silu at {at[0]}")
        assert_close([slope], [at[2]], what=f"derivative of silu at {at[0]}")
    y, dx = run("silu", make, to_np, "float32", [1e4, -1e4, 3e38, -3e38])
    np.testing.assert_array_equal(y, np.asarray([1e4, 0, 3e38, 0], dtype=np.float32))
    np.testing.assert_array_equal(dx, [1, 0, 1, 0])


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_gated_units_far_out(make: Any, to_np: Any, dtype: Any, name: Any) -> None:
    """A gate of ±10⁴ gives up or 0, without overflow."""
    y, dgate, dup = run(name, make, to_np, dtype, [1e4, -1e4, 1e4], [2.0, 2.0, -0.5])
    gate = to_np(make(1e4, dtype))
    np.testing.assert_array_equal(y, [2 * gate, 0, -0.5 * gate])
    np.testing.assert_array_equal(dgate, [2, 0, -0.5])
    np.testing.assert_array_equal(dup, [gate, 0, gate])


def test_log_softmax_far_out(make: Any, to_np: Any) -> None:
    """The logarithm is finite where softmax underflows to 0; −inf gives −inf and does not affect others."""
    y, dx = run("log_softmax", make, to_np, "float32", [[1e4, 0.0, -1e4], [-np.inf, 0.0, -np.inf]])
    np.testing.assert_array_equal(y, [[0.0, -1e4, -2e4], [-np.inf, 0.0, -np.inf]])
    np.testing.assert_array_equal(dx, [[-2.0, 1.0, 1.0], [1.0, -2.0, 1.0]])
    for name in ("softmax", "log_softmax"):  # a row full of −inf is NaN in both
        assert np.isnan(run(name, make, to_np, "float64", [[-np.inf, -np.inf]])[0]).all()


def test_rms_norm_far_out(make: Any, to_np: Any, dtype: Any) -> None:
    """The square of ±10⁴ overflows float16, that of the least normal numbers underflows: the result is x / √eps."""
    x = np.tile([1e4, -1e4], (1, 32))
    y, dx = run("rms_norm", make, to_np, dtype, x)
    assert_close(y, np.sign(x), dtype)
    assert_close(dx, np.full((1, 64), 1 / to_np(make(1e4, dtype))), dtype)
    tiny = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}[dtype]
    y, dx = run("rms_norm", make, to_np, dtype, np.full((1, 8), tiny), eps=0.25)
    assert_close(y, np.full((1, 8), 2 * tiny), dtype)
    assert_close(dx, np.full((1, 8), 2.0), dtype)
    y, dx = run("rms_norm", make, to_np, dtype, np.zeros((1, 8)))
    np.testing.assert_array_equal(y, np.zeros((1, 8)))
    assert_close(dx, np.full((1, 8), 1e-5**-0.5), dtype)


def test_a_finite_bias_excludes_nothing(make: Any, to_np: Any) -> None:
    """The lowest float64, beyond the range of float32: a row full of it has equal weights, not NaN."""
    bias = np.full((3, 5), np.finfo(np.float64).min)
    bias[0, 1] = 0.0
    bias[2, :3] = -np.inf
    out, _, _ = gradients(make, to_np, np.ones((2, 3, 3)), "float32", bias=make(bias))
    v = V.astype(np.float32)
    want = np.stack([v[:, 1], v.mean(axis=1), v[:, 3:].mean(axis=1)], axis=1)
    assert_close(out, want, "float32")


def test_a_sink_of_minus_infinity_is_none(make: Any, to_np: Any) -> None:
    mask = np.ones((3, 5), dtype=bool)
    mask[1] = False
    dout = RNG.standard_normal((2, 3, 3))
    out, lse, grads = gradients(make, to_np, dout, mask=make(mask, "bool"), sinks=make(np.full(2, -np.inf)))
    want_out, want_lse, want = gradients(make, to_np, dout, mask=make(mask, "bool"))
    assert_close(out, want_out)
    assert_close(lse, want_lse)
    for name in ("q", "k", "v"):
        assert_close(grads[name], want[name], what=name)
    np.testing.assert_array_equal(grads["sinks"], [0.0, 0.0])


def test_the_upstream_of_an_empty_row_moves_no_sink(make: Any, to_np: Any) -> None:
    """The output of an empty row is zeros for every sink, so NaN in its upstream gradient affects no gradient."""
    mask, sinks = np.ones((3, 5), dtype=bool), RNG.standard_normal(2)
    mask[1] = False
    dout = RNG.standard_normal((2, 3, 3))
    dout[:, 1] = np.nan
    _, _, grads = gradients(make, to_np, dout, mask=make(mask, "bool"), sinks=make(sinks))
    want = ref.attention_gradients(dout, Q, K, V, mask=mask, sinks=sinks)
    for name, gradient in grads.items():
        if gradient is not None:
            assert np.isfinite(gradient).all(), name
            assert_close(gradient, getattr(want, name), what=name)


@pytest.mark.parametrize("magnitude", [1e5, 2e9, 1e15])
@pytest.mark.parametrize("sign", [1, -1])
def test_large_scores(make: Any, to_np: Any, magnitude: Any, sign: Any) -> None:
    """Scores are integers that are exact in float32, so the largest of each row has weight 1, or ties share it."""
    q = np.full((1, 2, 1), sign * magnitude)
    k, v = np.array([[[1.0], [2.0], [2.0], [0.0]]]), RNG.standard_normal((1, 4, 3)).astype(np.float32)
    out = to_np(pa.attention(make(q, "float32"), make(k, "float32"), make(v, "float32"), scale=1.0))
    want = v[:, 1:3].mean(axis=1) if sign > 0 else v[:, 3]
    assert_close(out, np.repeat(want[:, None], 2, axis=1), "float32")


def test_arguments_that_look_like_others_are_refused(make: Any) -> None:
    """A window as an array, and an index that is not an integer."""
    inputs = [make(x) for x in (Q, K, V)]
    with pytest.raises(pa.DTypeError, match="window"):
        pa.attention(*inputs, window=(make(1, "int32"), None))
    with pytest.raises(pa.DTypeError, match="ignore_index"):
        F.cross_entropy(make(np.zeros((1, 3))), make([0], "int64"), ignore_index=1.5)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("sink", [1e4, -1e4])
def test_a_row_with_a_large_sink_alone(make: Any, to_np: Any, sink: Any) -> None:
    """A row without a key has the log-sum-exp of its sink, which may be large, and passes its gradient on."""
    q, k, v = (make(x[:, None], "float32") for x in (Q, K, V))
    out, cache = pa.attention_forward(q, k, v, key_lengths=0, sinks=make([sink], "float32"))
    dlse = np.full(cache.lse.shape, 0.5)
    grads = pa.attention_backward(make(np.ones(out.shape), "float32"), cache, make(dlse, "float32"))
    np.testing.assert_array_equal(to_np(out), np.zeros(out.shape))
    np.testing.assert_array_equal(to_np(cache.lse), np.full(cache.lse.shape, sink))
    assert_close(to_np(grads.sinks), [np.sum(dlse)], "float32")
    np.testing.assert_array_equal(to_np(grads.q), np.zeros(q.shape))
