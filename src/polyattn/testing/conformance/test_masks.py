"""Known faults of other implementations, as tests: masks, alignment, shapes, and excluded positions."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(5)
KINDS = {"b": "bool", "i": "int32"}


@pytest.fixture
def run(make: Any, to_np: Any) -> Any:
    """Return ``run(q, k, v, dout, dtype, **arguments)``: out, lse and gradients as NumPy arrays, from NumPy arrays."""

    def run(q: Any, k: Any, v: Any, dout: Any = None, dtype: Any = "float64", **arguments: Any) -> Any:
        native = {
            name: make(x, KINDS.get(x.dtype.kind, dtype)) if isinstance(x, np.ndarray) else x
            for name, x in arguments.items()
        }
        out, cache = pa.attention_forward(make(q, dtype), make(k, dtype), make(v, dtype), **native)
        dout = np.ones(tuple(out.shape)) if dout is None else dout
        grads = pa.attention_backward(make(dout, dtype), cache)
        return to_np(out), to_np(cache.lse), [None if x is None else to_np(x) for x in grads]

    return run


@pytest.fixture
def value(make: Any, to_np: Any) -> Any:
    """Return ``value(q, k, v, **arguments)``: the output alone."""

    def value(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        native = {
            name: make(x, KINDS.get(x.dtype.kind, "float64")) if isinstance(x, np.ndarray) else x
            for name, x in arguments.items()
        }
        return to_np(pa.attention(make(q), make(k), make(v), **native))

    return value


def test_empty_row(run: Any) -> None:
    """Case 1: output and gradient of the row are zeros, and all other gradients are those without the row."""
    mask = np.ones((2, 1, 3, 3), dtype=bool)
    mask[0, 0] = [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    mask[1, 0] = [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
    q, k, v, dout = (RNG.standard_normal((2, 1, 3, 1)) for _ in range(4))
    out, lse, (dq, dk, dv, *_) = run(q, k, v, dout, mask=mask)
    assert out[1, 0, 2, 0] == dq[1, 0, 2, 0] == 0.0
    assert lse[1, 0, 2] == -np.inf
    assert all(np.isfinite(x).all() for x in (out, dq, dk, dv))
    _, _, (dq_, dk_, dv_, *_) = run(q[1:, :, :2], k[1:], v[1:], dout[1:, :, :2], mask=mask[1:, :, :2])
    for got, want in ((dq[1:, :, :2], dq_), (dk[1:], dk_), (dv[1:], dv_)):
        assert_close(got, want)


def test_empty_row_after_a_projection_is_its_bias(contract: Any, to_np: Any) -> None:
    layer = pa.MultiHeadAttention(8, 2, dtype="float64", seed=1, backend=contract.name)
    bias = RNG.standard_normal(8)
    layer = layer.with_parameters({**layer.parameters(), "out_proj.bias": pa.to_backend(bias, contract.name)})
    mask = np.ones((4, 4), dtype=bool)
    mask[1] = False
    x = pa.to_backend(RNG.standard_normal((2, 4, 8)), contract.name)
    y = to_np(layer(x, mask=pa.to_backend(mask, contract.name)))
    np.testing.assert_array_equal(y[:, 1], np.broadcast_to(bias, (2, 8)))


def test_causal_with_left_padding(run: Any, dtype: Any) -> None:
    """Case 2: the intersection of both; row 0 is empty."""
    x = RNG.standard_normal((1, 1, 4, 8))
    out, _, grads = run(x, x, x, dtype=dtype, causal=True, mask=np.array([False, True, True, True]))
    assert not out[..., 0, :].any()
    assert np.isfinite(out).all()
    assert all(np.isfinite(gradient).all() for gradient in grads[:3])
    assert np.max(np.abs(out[..., 1, :] - x[..., 1, :])) < 0.02  # it attends only to itself


def test_bias_is_no_mask_and_a_mask_no_bias(value: Any, make: Any) -> None:
    """Case 3."""
    q, k, v = np.zeros((1, 4)), np.zeros((3, 4)), np.eye(3)
    assert_close(value(q, k, v, bias=np.array([0, np.log(2), np.log(4)])), [[1 / 7, 2 / 7, 4 / 7]])
    assert_close(value(q, k, v, mask=np.array([True, True, False])), [[0.5, 0.5, 0.0]])
    assert_close(value(q, k, v, bias=np.array([0, 0, -np.inf])), [[0.5, 0.5, 0.0]])
    for wrong in ("int32", "float64"):
        with pytest.raises(TypeError, match="bias"):
            pa.attention(make(q), make(k), make(v), mask=make([1, 1, 0], wrong))


def test_padding_is_of_keys(value: Any) -> None:
    """Case 4."""
    x = RNG.standard_normal((1, 1, 5, 3))
    out = value(x, x, x, causal=True, key_lengths=4)
    assert_close(out[0, 0, 4], ref.attention(x[0, 0, 4:], x[0, 0, :4], x[0, 0, :4]).out[0])
    out = value(x[:, :, :4], x[:, :, :4], x[:, :, :4], mask=np.array([True, True, False, False]))
    assert_close(out[0, 0, 2], ref.attention(x[0, 0, 2:3], x[0, 0, :2], x[0, 0, :2]).out[0])


@pytest.mark.parametrize("shape", [(3, 1), (1,), (17,), (1, 1), (2, 1, 1, 17), (1, 2, 3, 1), ()])
def test_masks_broadcast(run: Any, shape: Any) -> None:
    """Case 5: a mask equals its expansion."""
    q, k = RNG.standard_normal((2, 2, 3, 4)), RNG.standard_normal((2, 2, 17, 4))
    mask = np.array([[True], [False], [True]]) if shape == (3, 1) else np.asarray(RNG.random(shape) < 0.7)
    out, lse, grads = run(q, k, k, mask=mask)
    expanded = np.broadcast_to(mask, (2, 2, 3, 17))
    want = ref.attention(q, k, k, mask=expanded)
    assert_close(out, want.out)
    assert_close(lse, want.lse)
    for got, slope in zip(grads[:3], ref.attention_gradients(np.ones(out.shape), q, k, k, mask=expanded), strict=False):
        assert_close(got, slope)
    if shape == (3, 1):
        assert not out[..., 1, :].any()


def test_causal_alignment(value: Any) -> None:
    """Case 6: queries are the last positions; ``q_offset=0`` aligns them upper left."""
    for n_q, n_k, upper_left, lower_right in ((1, 8, [0.0], [3.5]), (2, 5, [0.0, 0.5], [1.5, 2.0])):
        q, k, v = np.zeros((1, n_q, 2)), np.zeros((1, n_k, 2)), np.arange(float(n_k)).reshape(1, -1, 1)
        assert_close(value(q, k, v, causal=True, q_offset=0).reshape(-1), upper_left)
        assert_close(value(q, k, v, causal=True).reshape(-1), lower_right)
    x = RNG.standard_normal((2, 6, 4))
    square = value(x, x, x, causal=True)
    for m in (1, 5):
        assert_close(value(x[:, -m:], x, x, causal=True), square[:, -m:])


def test_more_queries_than_keys(run: Any) -> None:
    """Case 7."""
    q, k, v = np.zeros((1, 5, 2)), np.zeros((1, 2, 2)), np.array([[[1.0, 2.0], [3.0, 6.0]]])
    out, lse, (dq, *_) = run(q, k, v, causal=True)
    assert_close(out[0], [[0, 0], [0, 0], [0, 0], [1, 2], [2, 4]])
    assert not dq[0, :3].any()
    assert np.isneginf(lse[0, :3]).all()
    assert_close(run(q, k, v, causal=True, q_offset=0)[0][0], [[1, 2], [2, 4], [2, 4], [2, 4], [2, 4]])


@pytest.mark.parametrize("empty", ["batch", "heads", "queries", "keys", "depth", "width"])
def test_zero_size_axes(run: Any, empty: Any) -> None:
    """Case 8: correct shapes, zeros without keys, uniform weights if the depth is zero."""
    size = {"batch": 2, "heads": 2, "queries": 3, "keys": 4, "depth": 5, "width": 6, empty: 0}
    b, h, n_q, n_k, d_k, d_v = size.values()
    v = RNG.standard_normal((b, h, n_k, d_v))
    shapes = ((b, h, n_q, d_k), (b, h, n_k, d_k), (b, h, n_k, d_v))
    for arguments in ({}, {"causal": True}, {"mask": np.ones((n_q, n_k), dtype=bool)}):
        out, lse, grads = run(np.ones(shapes[0]), np.ones(shapes[1]), v, **arguments)
        assert out.shape == (b, h, n_q, d_v)
        assert lse.shape == (b, h, n_q)
        assert tuple(gradient.shape for gradient in grads[:3]) == shapes
        if empty == "keys":
            assert not out.any()
            assert np.isneginf(lse).all()
            assert not grads[0].any()
        if empty == "depth" and not arguments:
            assert_close(out, np.broadcast_to(v.mean(-2, keepdims=True), out.shape))
            assert_close(grads[2], np.full(v.shape, 3 / 4))


@pytest.mark.parametrize("batch", [65535, 65536, 100000])
def test_large_batch(make: Any, to_np: Any, xp: Any, batch: Any) -> None:
    """Case 10: equal to the two halves, computed separately."""
    x = make(np.random.default_rng(1).standard_normal((batch, 1, 10, 16), dtype=np.float32), "float32")
    whole = to_np(pa.attention(x, x, x))
    half = batch // 2
    parts = [to_np(pa.attention(part, part, part)) for part in (x[:half, ...], x[half:, ...])]
    assert_close(whole, np.concatenate(parts), "float32")


def test_views_equal_their_copies(make: Any, to_np: Any, xp: Any) -> None:
    """Case 11: Fortran order, reversed and strided views, for q, k, v and dout one at a time."""
    hosts = [RNG.standard_normal((2, 4, 6)) for _ in range(4)]

    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, cache = pa.attention_forward(q, k, v, causal=True)
        return [to_np(x) for x in (out, *pa.attention_backward(dout, cache)[:3])]

    expected = run(*(make(x) for x in hosts))
    layouts: Any = (
        lambda x: xp.permute_dims(make(np.ascontiguousarray(x.transpose(2, 1, 0))), (2, 1, 0)),
        lambda x: xp.flip(make(np.ascontiguousarray(x[..., ::-1])), axis=-1),
        lambda x: make(np.ascontiguousarray(x.repeat(2, -1)))[..., ::2],
    )
    for position in range(4):
        for layout in layouts:
            views = [layout(x) if i == position else make(x) for i, x in enumerate(hosts)]
            for got, want in zip(run(*views), expected, strict=True):
                assert_close(got, want)
            np.testing.assert_array_equal(to_np(views[position]), hosts[position])


def test_float16_scores_overflow(target: Any, make: Any, to_np: Any) -> None:
    """Case 12: 64 products of 40 by 40 are above the largest float16."""
    dtype = "float16" if "float16" in target.dtypes else "float32"  # the same value in both
    q, k = np.full((1, 64), 40.0), np.stack([np.full(64, 40.0), np.full(64, 39.96875)])
    out = to_np(pa.attention(make(q, dtype), make(k, dtype), make([[0.0], [10000.0]], dtype)))
    assert abs(out[0, 0] - 0.45398) <= 5e-3 * 0.45398


POISON = {"nan": np.nan, "inf": np.inf, "minus-inf": -np.inf}


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("how", ["mask", "causal", "key_lengths", "window", "segment_ids", "bias", "softcap", "sinks"])
def test_excluded_keys_reach_nothing(make: Any, run: Any, how: Any, poison: Any) -> None:
    """The values at keys 4 and 5, which every row excludes, affect neither output nor gradients."""
    q, dout = RNG.standard_normal((2, 1, 3, 4)), RNG.standard_normal((2, 1, 3, 4))
    k, v = RNG.standard_normal((2, 1, 6, 4)), RNG.standard_normal((2, 1, 6, 4))
    lengths = np.arange(6) < 4
    arguments: Any = {
        "mask": {"mask": lengths},
        "causal": {"causal": True, "q_offset": 1},
        "key_lengths": {"key_lengths": 4},
        "window": {"window": (None, 0), "q_offset": 1},
        "segment_ids": {},
        "bias": {"bias": np.where(lengths, 0.5, -np.inf)},
        "softcap": {"mask": lengths, "softcap": 2.0},
        "sinks": {"mask": lengths, "sinks": np.array([0.5])},
    }[how]
    if how == "segment_ids":
        ids = (np.zeros((2, 3), dtype=np.int32), np.array([[0, 0, 0, 0, 1, 1]] * 2, dtype=np.int32))
        arguments = {"segment_ids": tuple(make(x, "int32") for x in ids)}
    clean = run(q, k, v, dout, **arguments)
    k[..., 4:, :] = v[..., 4:, :] = POISON[poison]
    dirty = run(q, k, v, dout, **arguments)
    for got, want in zip((dirty[0], dirty[1], *dirty[2]), (clean[0], clean[1], *clean[2]), strict=True):
        if want is not None:
            assert_close(got, want)
    assert not dirty[2][1][..., 4:, :].any()
    assert not dirty[2][2][..., 4:, :].any()


def test_query_rows_reach_no_key_they_exclude(run: Any) -> None:
    """NaN in query row 0, or in its dout, affects only the gradients of key 0, and is propagated there."""
    x, dout = RNG.standard_normal((1, 4, 3)), RNG.standard_normal((1, 4, 3))
    q, bad = x.copy(), dout.copy()
    q[0, 0] = bad[0, 0] = np.nan
    for query, upstream in ((q, dout), (x, bad)):
        out, _, (dq, dk, dv, *_) = run(query, x, x, upstream, causal=True)
        want = ref.attention_gradients(upstream, query, x, x, causal=True)
        assert_close(out, ref.attention(query, x, x, causal=True).out)
        assert_close(dq, want.q, what="dq")
        assert_close(dk, want.k, what="dk")
        assert_close(dv, want.v, what="dv")
        assert np.isnan(dk[0, 0]).all()


def test_infinities_that_are_not_excluded_are_not_hidden(run: Any) -> None:
    """Infinite values of either sign or both, also if the weight underflows to zero (0 · inf is NaN)."""
    q, k, v = np.ones((1, 4, 2)), np.zeros((1, 5, 2)), RNG.standard_normal((1, 5, 3))
    k[0, 3] = -2000.0
    v[0, 1, 0], v[0, 2, :2], v[0, 3, 2] = np.inf, -np.inf, np.inf
    mask = np.array([[1, 1, 0, 0, 1], [1, 0, 1, 0, 1], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]], dtype=bool)
    out, lse, _ = run(q, k, v, mask=mask)
    want = ref.attention(q, k, v, mask=mask)
    assert np.isposinf(want.out).any()
    assert np.isneginf(want.out).any()
    assert np.isnan(want.out[0, 3, 2])
    assert_close(out, want.out)
    assert_close(lse, want.lse)


def test_nan_that_is_not_excluded_is_not_hidden(run: Any) -> None:
    k = RNG.standard_normal((1, 4, 3))
    k[0, 1] = np.nan
    x = RNG.standard_normal((1, 4, 3))
    for arguments in ({}, {"causal": True}, {"mask": np.array([True, True, True, False])}):
        out, lse, _ = run(x, k, x, **arguments)
        want = ref.attention(x, k, x, **arguments)
        assert_close(out, want.out)
        assert_close(lse, want.lse)
