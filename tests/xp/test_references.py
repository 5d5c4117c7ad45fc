"""The references themselves: every reference gradient against central differences of the reference value."""

import numpy as np
import pytest

from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES
from polyattn.testing.compare import central_differences, slopes_agree

RNG = np.random.default_rng(0)
X, DY = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((2, 3, 4))


def agree(gradient, function, x):
    numerical = central_differences(function, x)
    scale = np.max(np.abs(numerical)) or 1.0
    assert np.max(np.abs(gradient - numerical)) <= 1e-6 * scale


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(axis):
    agree(ref.softmax_gradient(DY, X, axis), lambda x: np.sum(ref.softmax(x, axis) * DY), X)


def test_linear():
    weight, bias, dy = RNG.standard_normal((4, 2)), RNG.standard_normal(2), RNG.standard_normal((2, 3, 2))
    dx, dweight, dbias = ref.linear_gradients(dy, X, weight)
    agree(dx, lambda x: np.sum(ref.linear(x, weight, bias) * dy), X)
    agree(dweight, lambda w: np.sum(ref.linear(X, w, bias) * dy), weight)
    agree(dbias, lambda b: np.sum(ref.linear(X, weight, b) * dy), bias)


def test_layer_norm():
    weight, bias = RNG.standard_normal(4), RNG.standard_normal(4)
    dx, dweight, dbias = ref.layer_norm_gradients(DY, X, weight, 1e-2)
    agree(dx, lambda x: np.sum(ref.layer_norm(x, weight, bias, 1e-2) * DY), X)
    agree(dweight, lambda w: np.sum(ref.layer_norm(X, w, bias, 1e-2) * DY), weight)
    agree(dbias, lambda b: np.sum(ref.layer_norm(X, weight, b, 1e-2) * DY), bias)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_norms_over_several_axes(axes):
    weight, bias = RNG.standard_normal(X.shape[-axes:]), RNG.standard_normal(X.shape[-axes:])
    dx, dweight, dbias = ref.layer_norm_gradients(DY, X, weight, 1e-2, axes)
    agree(dx, lambda x: np.sum(ref.layer_norm(x, weight, bias, 1e-2, axes) * DY), X)
    agree(dweight, lambda w: np.sum(ref.layer_norm(X, w, bias, 1e-2, axes) * DY), weight)
    agree(dbias, lambda b: np.sum(ref.layer_norm(X, weight, b, 1e-2, axes) * DY), bias)
    dx, dweight = ref.rms_norm_gradients(DY, X, weight, 1e-2, axes)
    agree(dx, lambda x: np.sum(ref.rms_norm(x, weight, 1e-2, axes) * DY), X)
    agree(dweight, lambda w: np.sum(ref.rms_norm(X, w, 1e-2, axes) * DY), weight)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_log_softmax(axis):
    agree(ref.log_softmax_gradient(DY, X, axis), lambda x: np.sum(ref.log_softmax(x, axis) * DY), X)


def test_scores_that_share_one_huge_value():
    """The weights of a row sum to one, though the row's log-sum-exp has no digit left for the sum."""
    ones = np.ones((1, 3, 2))
    answer = ref.attention(ones[:, :1], ones, ones, bias=np.full(3, -1e308), sinks=[-1e308])
    np.testing.assert_allclose(answer.weights, np.full((1, 1, 3), 0.25))
    np.testing.assert_allclose(answer.out, np.full((1, 1, 2), 0.75))


def test_embedding():
    indices = np.array([[0, 1, 0], [0, 0, 1]])
    table = RNG.standard_normal((3, 4))
    agree(ref.embedding_gradient(DY, indices, table), lambda w: np.sum(ref.embedding(indices, w) * DY), table)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_activations(approximate):
    agree(ref.silu_gradient(DY, X), lambda x: np.sum(ref.silu(x) * DY), X)
    up = RNG.standard_normal(X.shape)
    for (dgate, dup), gated in (
        (ref.swiglu_gradients(DY, X, up), ref.swiglu),
        (ref.geglu_gradients(DY, X, up, approximate), lambda gate, up: ref.geglu(gate, up, approximate)),
    ):
        agree(dgate, lambda x, f=gated: np.sum(f(x, up) * DY), X)
        agree(dup, lambda x, f=gated: np.sum(f(X, x) * DY), up)
    agree(ref.gelu_gradient(DY, X, approximate), lambda x: np.sum(ref.gelu(x, approximate) * DY), X)
    agree(ref.relu_gradient(DY, X), lambda x: np.sum(ref.relu(x) * DY), X)


@pytest.mark.parametrize("kind", [None, "linear", "ntk", "yarn", "llama3"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(kind, interleaved):
    numbers = {"original_length": 64} if kind in ("yarn", "llama3") else {}
    numbers |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaling = {"kind": kind, "factor": 4.0, **numbers} if kind else None
    arguments = {"offset": np.array([3, 40]), "interleaved": interleaved, "scaling": scaling, "base": 100.0}
    x, dy = X[:, None], DY[:, None]
    dx = ref.rotary_embedding_gradient(dy, **arguments)
    agree(dx, lambda x: np.sum(ref.rotary_embedding(x, **arguments) * dy), x)


def test_mse():
    dprediction, dtarget = ref.mse_loss_gradients(0.7, X, DY)
    agree(dprediction, lambda x: 0.7 * float(ref.mse_loss(x, DY)), X)
    agree(dtarget, lambda x: 0.7 * float(ref.mse_loss(X, x)), DY)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [None, 2])
def test_cross_entropy(reduction, ignore_index):
    labels, weight = np.array([[0, 2, 3], [1, 2, 0]]), np.array([0.5, 1.0, 2.0, 0.25])
    dy = RNG.standard_normal((2, 3)) if reduction == "none" else 0.7
    options = {"reduction": reduction, "ignore_index": ignore_index}
    dlogits = ref.cross_entropy_gradient(dy, X, labels, weight=weight, **options)
    agree(dlogits, lambda x: np.sum(ref.cross_entropy(x, labels, weight=weight, **options) * dy), X)
    dweight = ref.cross_entropy_weight_gradient(dy, X, labels, weight=weight, **options)
    agree(dweight, lambda w: np.sum(ref.cross_entropy(X, labels, weight=w, **options) * dy), weight)


@pytest.mark.parametrize("name", ["plain", "mask-empty-rows", "broadcast-axes", "grouped-heads", "everything"])
def test_attention(name):
    problem = next(case for case in CASES if case.name == name).problem()
    arguments = problem.arguments
    names = [key for key in ("bias", "sinks") if key in arguments]
    hosts = [*problem.inputs, *(arguments[key] for key in names)]
    gradients = ref.attention_gradients(problem.dout, *problem.inputs, dlse=problem.dlse, **arguments)

    def loss(*xs):
        moved = arguments | dict(zip(names, xs[3:], strict=True))
        answer = ref.attention(*xs[:3], **moved)
        lse = np.where(np.isfinite(answer.lse), answer.lse, 0.0)
        return np.sum(answer.out * problem.dout) + np.sum(lse * problem.dlse)

    slopes_agree(loss, hosts, [gradient for gradient in gradients if gradient is not None])


def test_attention_with_dropout():
    q, k, v, dout = (RNG.standard_normal((2, 3, 4)) for _ in range(4))
    keep = ref.keep_mask((2, 3, 3), 0.4, 5)
    gradients = ref.attention_gradients(dout, q, k, v, keep=keep, dropout=0.4)
    agree(gradients.q, lambda x: np.sum(ref.attention(x, k, v, keep=keep, dropout=0.4).out * dout), q)
    agree(gradients.k, lambda x: np.sum(ref.attention(q, x, v, keep=keep, dropout=0.4).out * dout), k)
    agree(gradients.v, lambda x: np.sum(ref.attention(q, k, x, keep=keep, dropout=0.4).out * dout), v)


def test_multi_head_attention():
    parameters = {f"{name}_proj.weight": RNG.standard_normal((4, 4)) for name in ("q", "k", "v", "out")}
    parameters |= {f"{name}_proj.bias": RNG.standard_normal(4) for name in ("q", "k", "v", "out")}

    def loss(query, key, value, moved):
        return np.sum(ref.multi_head_attention(moved, query, key, value, num_heads=2, scale="model") * DY)

    inputs = [RNG.standard_normal((2, n, 4)) for n in (3, 5, 5)]
    slopes, gradients = ref.multi_head_attention_gradients(DY, parameters, *inputs, num_heads=2, scale="model")
    for position, slope in enumerate(slopes):
        agree(slope, lambda x, i=position: loss(*inputs[:i], x, *inputs[i + 1 :], parameters), inputs[position])
    for name, gradient in gradients.items():
        if name != "k_proj.bias":
            agree(gradient, lambda p, n=name: loss(*inputs, {**parameters, n: p}), parameters[name])
    assert np.max(np.abs(gradients["k_proj.bias"])) < 1e-12  # adding the same to all keys changes no softmax


def test_merge_is_attention_over_all_keys():
    q, k, v = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((2, 5, 4)), RNG.standard_normal((2, 5, 4))
    parts = [ref.attention(q, k[:, cut], v[:, cut])[:2] for cut in (slice(0, 2), slice(2, 5))]
    whole = ref.attention(q, k, v)
    out, lse = ref.merge(parts)
    assert_close(out, whole.out)
    assert_close(lse, whole.lse)


def test_comparison_can_fail():
    with pytest.raises(AssertionError, match="relative error"):
        assert_close([1.0, 2.0], [1.0, 2.0 + 1e-9])
    with pytest.raises(AssertionError, match="shape"):
        assert_close([1.0], [[1.0]])
    for wrong in (np.nan, np.inf):
        with pytest.raises(AssertionError):
            assert_close([1.0, wrong], [1.0, 2.0])
        with pytest.raises(AssertionError):
            assert_close([1.0, 2.0], [1.0, wrong])
