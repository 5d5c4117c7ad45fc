"""Reports of attention's scores: bias, sinks, softcap, ALiBi, grouped heads and the size of numbers."""

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(141)

# The shapes of queries and of the bias; keys are five.
BIASES = {
    "jax-27184": ((3, 2, 4, 8), (3, 2, 4, 5)),
    "jax-30593": ((3, 2, 4, 8), (1, 2, 4, 5)),
    "jax-36702": ((2, 3, 2, 4, 8), (2, 1, 1, 4, 5)),
    "xformers-636": ((3, 2, 4, 8), (2, 4, 1)),
    "xformers-783": ((3, 2, 4, 8), (1, 1, 1, 5)),
}


@pytest.mark.parametrize("report", BIASES)
def test_a_bias_has_its_gradient(report, agrees):
    """Whatever axes it lacks, the gradient is the sum over them."""
    shape, of_bias = BIASES[report]
    k, v = RNG.standard_normal((2, *shape[:-2], 5, 8))
    grads = agrees(RNG.standard_normal(shape), k, v, bias=RNG.standard_normal(of_bias)).grads
    assert grads.bias.shape == of_bias
    assert np.abs(grads.bias).max() > 1e-2 or of_bias[-1] == 1  # one number for a row has no influence


def test_mlx_2096_a_number_for_each_head(agrees):
    """One query, one key and a bias for each head: the result is the value."""
    x = RNG.standard_normal((1, 8, 1, 64))
    bias = np.array([3.5, 0.45, 3.2, 0.97, -5.5, 5.2, 2.2, 0.54]).reshape(8, 1, 1)
    assert_close(agrees(x, x, x, bias=bias, scale=1.0).out, x)


def test_xformers_808_a_slice_of_a_wider_bias(make, to_np):
    """The first 77 of 80 columns, a view: as a contiguous copy, forward and backward."""
    q, k, v = (make(x) for x in RNG.standard_normal((3, 2, 77, 4)))
    wide = RNG.standard_normal((2, 77, 80))
    results = []
    for bias in (make(wide)[:, :, :77], make(wide[:, :, :77])):
        out, cache = pa.attention_forward(q, k, v, bias=bias)
        results.append([to_np(out), to_np(pa.attention_backward(v, cache).bias)])
    assert_close(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1])
    assert_close(results[0][0], ref.attention(*map(to_np, (q, k, v)), bias=wide[:, :, :77]).out)


def test_mlx_3452_sinks_for_one_query_and_for_many(make, to_np, agrees):
    """The last query by itself has the result that it has among 34, over one key-value head."""
    q, kv = RNG.standard_normal((2, 4, 34, 8)), RNG.standard_normal((2, 1, 34, 8))
    sinks = np.array([2.0, -1.0, 0.0, 5.0])
    whole = agrees(q, kv, kv, sinks=sinks).out
    alone = pa.attention(make(q[:, :, -1:]), make(kv), make(kv), sinks=make(sinks))
    assert_close(to_np(alone), whole[:, :, -1:])


def test_pytorch_151359_six_queries_for_a_key(agrees):
    """12 query heads over 2 key-value heads: groups of 6, no power of two; one query."""
    agrees(RNG.standard_normal((1, 12, 1, 16)), *RNG.standard_normal((2, 1, 2, 9, 16)))


def test_llama_cpp_20031_alibi_of_12_heads(dtypes, make, to_np):
    """Heads that are no power of two, ten features, 16-bit floats: as the bias written out."""
    slopes = 2.0 ** -np.array([1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5])
    bias = -slopes[:, None, None] * np.abs(np.arange(7) - np.arange(7)[:, None])
    for dtype in dtypes:
        q, k, v = (make(x, dtype) for x in RNG.standard_normal((3, 12, 7, 10)))
        want = ref.attention(*map(to_np, (q, k, v)), bias=bias, causal=True).out
        assert_close(to_np(pa.attention(q, k, v, bias=pa.alibi_bias(12), causal=True)), want, dtype)


def test_onnx_7865_the_mask_comes_after_the_softcap(agrees):
    """A cap of 1 keeps every score above −1; an excluded key has no weight all the same."""
    q, k, v = RNG.standard_normal((3, 2, 4, 8))
    v[:, 0] = 1e6
    out = agrees(q, k, v, softcap=1.0, mask=np.array([False, True, True, True])).out
    assert np.abs(out).max() < 10


def test_onnxruntime_28370_the_bias_comes_after_the_softcap(make, to_np):
    """Scores 0, cap 1, bias [0, ln 1000]: 1/1001 and 1000/1001. The other order would cap the bias."""
    q, k = make(np.zeros((1, 1, 4))), make(np.zeros((1, 2, 4)))
    weights = pa.attention_weights(q, k, softcap=1.0, bias=make([0.0, np.log(1000.0)]))
    assert_close(to_np(weights), [[[1 / 1001, 1000 / 1001]]])


def test_llama_cpp_29034_softcap_past_a_whole_tile(agrees):
    """65 keys, every score at −cap: padding that the cap had made finite would take half of the weight."""
    q, k = np.full((1, 2, 8), 9.0), np.full((1, 65, 8), -9.0)
    agrees(q, k, RNG.standard_normal((1, 65, 3)), "float32", softcap=5.0)


def test_pytorch_109517_columns_of_the_lowest_number(agrees):
    """A bias of the lowest float32 at the first 128 of 130 keys: they have no weight, and nothing is NaN."""
    bias = np.zeros((12, 130))
    bias[:, :128] = np.finfo(np.float32).min
    grads = agrees(RNG.standard_normal((2, 12, 8)), *RNG.standard_normal((2, 2, 130, 8)), "float32", bias=bias).grads
    assert not grads.v[:, :128].any()


def test_jax_34114_penalties_beyond_float32(agrees):
    """Float64 penalties of −1e308 beside none, and in a whole row: finite, and the row has equal weights."""
    bias = np.array([[0.0, -1e308, 0.0], [-1e308, -1e308, -1e308]])
    v = RNG.standard_normal((1, 3, 2))
    out = agrees(np.ones((1, 2, 4)), np.ones((1, 3, 4)), v, bias=bias).out
    assert_close(out[0], [v[0, [0, 2]].mean(axis=0), v[0].mean(axis=0)])


def test_pytorch_125674_constant_rows(dtypes, make, to_np):
    """Every feature 1000, scores of 8e6: the result is 1000, and gradients of queries and keys are zero."""
    for dtype in dtypes:
        x = make(np.full((2, 6, 64), 1000.0), dtype)
        out, cache = pa.attention_forward(x, x, x)
        assert_close(to_np(out), to_np(x), dtype)
        grads = pa.attention_backward(make(np.ones((2, 6, 64)), dtype), cache)
        assert_close(to_np(grads.v), np.ones((2, 6, 64)), dtype)
        for name in ("q", "k"):  # (64 · 1000) · 1000 / 8 is the size of the terms that cancel
            assert_close(to_np(getattr(grads, name)), np.zeros((2, 6, 64)), dtype, scale=8e6, what=name)


@pytest.mark.parametrize("report", ["jax-17117", "jax-19490"])
def test_excluded_scores_far_above_the_others(report, agrees):
    """No exponential of an excluded score is formed against the largest visible one, in the backward too."""
    if report == "jax-17117":
        q, k, mask = np.ones((1, 1, 1)), np.array([[[1.0], [1.0], [1e4]]]), np.array([True, True, False])
    else:
        q, k = np.full((1, 40, 1), 10.0), 10 * RNG.standard_normal((1, 12, 1))
        mask = RNG.random((40, 12)) < 0.5
        mask[:, 5] = True
    grads = agrees(q, k, RNG.standard_normal((*k.shape[:-1], 2)), "float32", mask=mask).grads
    assert not grads.k[0, ~np.atleast_2d(mask).any(axis=0)].any()


def test_pytorch_162588_a_mask_over_many_keys(make, to_np):
    """Of 4,099 keys a mask allows the last, or the first and the last."""
    mask = np.zeros((2, 4099), dtype=bool)
    mask[:, -1] = mask[1, 0] = True
    v = np.arange(4099.0)[None, :, None]
    q, k = make(np.zeros((1, 2, 4)), "float32"), make(np.zeros((1, 4099, 4)), "float32")
    out = pa.attention(q, k, make(v, "float32"), mask=make(mask, "bool"))
    np.testing.assert_array_equal(to_np(out), [[[4098.0], [2049.0]]])


def test_pytorch_116333_strides_of_axes_of_one(make, to_np):
    """Two queries of one feature, a transposed view whose strides say nothing: as a copy."""
    q, k, v = make([[[[1.0, 2.0]]]]), make([[[[1.0]]]]), make([[[[3.0]]]])
    out, cache = pa.attention_forward(q.mT, k, v)
    np.testing.assert_array_equal(to_np(out), [[[[3.0], [3.0]]]])
    np.testing.assert_array_equal(to_np(pa.attention_backward(out, cache).v), [[[[6.0]]]])


def test_mlx_3585_a_length_of_no_whole_tiles(agrees):
    """82 positions, 64 features, numbers that rise slowly: no key is left out or counted twice."""
    x = np.linspace(-0.5, -0.49, 2 * 82 * 64).reshape(2, 82, 64)
    agrees(x, x[:, ::-1], 100 * x, "float32")
