"""The smallest inputs of what random problems found (tests/faults): each was wrong on some library or kernel."""

import numpy as np
import pytest

import polyattn as pa
from polyattn.kernels import candidates
from polyattn.testing import assert_close
from polyattn.testing import references as ref

F = pa.functional
Q = np.array([[0.3, -1.2, 0.5, 2.0], [1.0, 0.4, -0.7, 0.1]])
K = np.array([[0.2, 1.1, -0.3, 0.9], [-1.5, 0.6, 0.8, -0.2], [0.7, -0.4, 1.3, 0.5]])
V = np.array([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25]])
FAR = 2**40


def of_each_kernel(contract, call):
    """Return what a call returns by each kernel that does not decline, by name."""
    found = {}
    for kernel in candidates(contract.kernels):
        try:
            found[kernel.name] = call(kernel.name)
        except pa.KernelUnsupportedError:
            continue
    assert {"tiled", "plain"} <= set(found)
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_row_of_large_scores_is_not_empty(dtype, contract, make, to_np):
    """The rounding error of a score of 2⁴⁰ is far from 0, and its exponential was 0: the row came out as zeros."""
    k, v = make(np.array([[2.0**20]]), dtype), make(np.array([[0.5, 3.0]]), dtype)
    for factor in range(1, 13):
        q = make(np.array([[factor * 2.0**20]]), dtype)
        found = of_each_kernel(contract, lambda kernel, q=q: pa.attention(q, k, v, scale=0.125, kernel=kernel))
        for name, out in found.items():
            assert_close(to_np(out), [[0.5, 3.0]], dtype, what=f"out of {name} for {factor}")


@pytest.mark.parametrize(("d_k", "d_v"), [(0, 2), (2, 0), (0, 0)])
def test_kernels_without_features(d_k, d_v, contract, make, to_np):
    """A kernel that is forced computes features of length 0 or declines them."""
    q, k, v = (make(np.ones((3, 5, d))) for d in (d_k, d_k, d_v))
    k, v = k[:1, ...], v[:1, ...]
    for out in of_each_kernel(contract, lambda kernel: pa.attention(q, k, v, kernel=kernel)).values():
        np.testing.assert_array_equal(to_np(out), np.ones((3, 5, d_v)))


@pytest.mark.parametrize("n_k", [0, 3])
def test_a_sink_of_minus_infinity_has_no_gradient(n_k, make, to_np):
    """It counts as none, also where there are no keys."""
    q, k, v = make(Q[:, None]), make(K[None, :n_k]), make(V[None, :n_k])
    out, cache = pa.attention_forward(q, k, v, sinks=make(np.array([0.5, -np.inf])))
    grads = pa.attention_backward(make(np.zeros(out.shape)), cache, make(np.ones((2, 1))))
    assert to_np(grads.sinks)[1] == 0 < to_np(grads.sinks)[0]


def test_a_sink_of_minus_infinity_beside_large_scores(tiles, contract, make, to_np):
    """Rows of several tiles that attend to nothing have no largest score to subtract from it."""
    tiles(2, 4)
    q, k, v = np.full((2, 12, 1), 20.0), np.full((2, 6, 1), 3.0), np.ones((2, 6, 1))
    sinks = np.array([-np.inf, 0.5])
    want = ref.attention_gradients(np.ones((2, 12, 1)), q, k, v, causal=True, sinks=sinks)

    def gradients(kernel):
        _, cache = pa.attention_forward(make(q), make(k), make(v), causal=True, sinks=make(sinks), kernel=kernel)
        return pa.attention_backward(make(np.ones((2, 12, 1))), cache)

    for name, grads in of_each_kernel(contract, gradients).items():
        assert_close(to_np(grads.sinks), want.sinks, what=f"gradient of the sinks, {name}", scale=1.0)


@pytest.mark.parametrize(
    ("offset", "window"),
    [(FAR, (FAR, None)), (FAR, (FAR, FAR)), (FAR - 2, (FAR, 0)), (-FAR, (None, FAR))],
)
def test_positions_far_beyond_32_bits(offset, window, contract, make, to_np):
    """An offset and a window that are both far away leave the same keys as their difference."""
    want = ref.attention(Q, K, V, q_offset=offset, window=window).out
    arrays = [make(x) for x in (Q, K, V)]
    far = {"q_offset": offset, "window": window}
    found = of_each_kernel(contract, lambda kernel: pa.attention(*arrays, **far, kernel=kernel))
    for name, out in found.items():
        assert_close(to_np(out), want, what=f"out of {name}")


@pytest.mark.parametrize("offset", [2**31 - 1, 2**31, 2**40, -(2**31) - 1, -(2**40)])
def test_rotary_positions_beyond_32_bits(offset, make, backend):
    x = make(np.ones((1, 2, 4)))
    with pytest.raises(pa.ArgumentError, match=r"^offset: expected positions of 32 bits"):
        F.rotary_embedding(x, offset=offset)
    layer = pa.MultiHeadAttention(4, 2, rotary=True, dtype="float64", backend=backend)
    with pytest.raises(pa.ArgumentError, match=r"^q_offset: expected positions of 32 bits"):
        layer(x, q_offset=offset)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sink_of_a_query_with_nan(dtype, contract, make, to_np):
    """Where no key is allowed, the log-sum-exp is the sink, whatever the query and the keys are."""
    q, k = np.array([[np.nan, 1.0], [1.0, 2.0]]), np.full((3, 2), np.inf)
    arrays = [make(x, dtype) for x in (q, k, V)]
    sinks, bias, mask = make(np.array([0.3]), dtype), make(np.zeros(3), dtype), make(np.array(False), "bool")
    more = {"sinks": sinks, "bias": bias, "mask": mask}
    found = of_each_kernel(contract, lambda kernel: pa.attention_forward(*arrays, **more, kernel=kernel)[1])
    for name, cache in found.items():
        assert_close(to_np(cache.lse), np.full(2, 0.3), dtype, what=f"lse of {name}")


def test_digits_beside_nan(contract, make, to_np):
    """NaN in one row of dout and in one value leaves the digits of what depends on neither."""
    v, dout = np.array([[1.0, 0.5], [np.nan, 2.0]]), np.array([[0.6, -0.1], [np.nan, 0.3]])
    mask = np.array([[True, False], [False, True]])
    want = ref.attention_gradients(dout, Q[:, :2], K[:2, :2], v, mask=mask, scale=40.0)
    arrays = [make(x, "float32") for x in (Q[:, :2], K[:2, :2], v)]

    def gradients(kernel):
        _, cache = pa.attention_forward(*arrays, mask=make(mask, "bool"), scale=40.0, kernel=kernel)
        return pa.attention_backward(make(dout, "float32"), cache)

    for name, grads in of_each_kernel(contract, gradients).items():
        assert_close(to_np(grads.v)[0], want.v[0], "float32", what=f"gradient of the first value, {name}")


def test_nan_stays_in_its_row_of_a_table(make, to_np):
    """The gradient of a table adds up rows; NaN in one is in no other."""
    _, cache = F.embedding_forward(make(np.array([0, 2, 1]), "int32"), make(np.ones((4, 2))))
    dweight = F.embedding_backward(make(np.array([[1.0, 2.0], [np.nan, np.inf], [3.0, 4.0]])), cache).weight
    np.testing.assert_array_equal(to_np(dweight), [[1.0, 2.0], [3.0, 4.0], [np.nan, np.inf], [0.0, 0.0]])
