"""Differentiation by the libraries calls the hand-written backward passes."""

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.plugin import TARGET

F = pa.functional
RNG = np.random.default_rng(61)
X, DY = RNG.standard_normal((2, 4, 6)), RNG.standard_normal((2, 4, 6))
SQUARE, BIAS = RNG.standard_normal((6, 6)), RNG.standard_normal(6)
Q, K, V = (RNG.standard_normal((2, n, 6)) for n in (4, 5, 5))


def by_torch(function, hosts, dy):
    import torch

    leaves = [torch.tensor(x, requires_grad=True) for x in hosts]
    y = function(*leaves)
    y.backward(torch.as_tensor(dy))
    return y.detach().numpy(), [leaf.grad.numpy() for leaf in leaves]


def by_jax(function, hosts, dy):
    import jax

    y, pullback = jax.vjp(function, *(jax.numpy.asarray(x) for x in hosts))
    return np.asarray(y), [np.asarray(dx) for dx in pullback(jax.numpy.asarray(dy))]


def by_compiled_jax(function, hosts, dy):
    import jax

    return by_jax(jax.jit(function), hosts, dy)


WAYS = {"torch": [by_torch], "jax": [by_jax, by_compiled_jax]}


def pytest_generate_tests(metafunc):
    if "differentiate" in metafunc.fixturenames:
        none = [pytest.param(None, marks=pytest.mark.needs("autograd"))]
        metafunc.parametrize("differentiate", WAYS.get(metafunc.config.stash[TARGET].name, none))


OPERATIONS = {
    "softmax": (F.softmax, (X,), lambda: [ref.softmax_gradient(DY, X)]),
    "linear": (F.linear, (X, SQUARE, BIAS), lambda: ref.linear_gradients(DY, X, SQUARE)),
    "layer_norm": (F.layer_norm, (X, BIAS, BIAS), lambda: ref.layer_norm_gradients(DY, X, BIAS)),
    "relu": (F.relu, (X,), lambda: [ref.relu_gradient(DY, X)]),
    "gelu": (F.gelu, (X,), lambda: [ref.gelu_gradient(DY, X)]),
    "rms_norm": (F.rms_norm, (X, BIAS), lambda: ref.rms_norm_gradients(DY, X, BIAS)),
    "log_softmax": (F.log_softmax, (X,), lambda: [ref.log_softmax_gradient(DY, X)]),
    "silu": (F.silu, (X,), lambda: [ref.silu_gradient(DY, X)]),
    "swiglu": (F.swiglu, (X, DY), lambda: ref.swiglu_gradients(DY, X, DY)),
    "geglu": (F.geglu, (X, DY), lambda: ref.geglu_gradients(DY, X, DY)),
    "rotary_embedding": (F.rotary_embedding, (X,), lambda: [ref.rotary_embedding_gradient(DY)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(differentiate, name):
    function, hosts, want = OPERATIONS[name]
    y, got = differentiate(function, hosts, DY)
    assert_close(y, getattr(ref, name)(*hosts))
    for gradient, expected in zip(got, want(), strict=True):
        assert_close(gradient, expected)


def test_embedding(differentiate, make):
    """The table has a gradient, and the indices have none."""
    indices = RNG.integers(0, 6, (2, 4))
    y, (dweight,) = differentiate(lambda weight: F.embedding(make(indices, "int32"), weight), (SQUARE,), DY)
    assert_close(y, SQUARE[indices])
    assert_close(dweight, ref.embedding_gradient(DY, indices, SQUARE))


@pytest.mark.needs("jit")
def test_traced_indices():
    """Traced indices need no gradient; an index out of range gives zeros, and no row has a gradient from it."""
    import jax

    def loss(weight, indices):
        return jax.numpy.sum(F.embedding(indices, weight) * jax.numpy.asarray(DY[0]))

    indices = np.array([2, 6, -1, 2])
    value, dweight = jax.jit(jax.value_and_grad(loss))(jax.numpy.asarray(SQUARE), jax.numpy.asarray(indices))
    inside = [0, 3]
    assert_close(value, np.sum(SQUARE[indices[inside]] * DY[0, inside]))
    assert_close(np.asarray(dweight), ref.embedding_gradient(DY[0, inside], indices[inside], SQUARE))


def test_losses(differentiate):
    _, got = differentiate(F.mse_loss, (X, DY), np.asarray(1.3))
    for gradient, expected in zip(got, ref.mse_loss_gradients(1.3, X, DY), strict=True):
        assert_close(gradient, expected)


def test_attention(differentiate):
    bias, sinks = RNG.standard_normal((1, 4, 5)), RNG.standard_normal(1)

    def function(q, k, v, bias, sinks):
        heads = (x[..., None, :, :] for x in (q, k, v))
        return pa.attention(*heads, causal=True, bias=bias, sinks=sinks, softcap=2.0)[..., 0, :, :]

    host = {"causal": True, "bias": bias, "sinks": sinks, "softcap": 2.0}
    heads = [x[:, None] for x in (Q, K, V)]
    y, got = differentiate(function, (Q, K, V, bias, sinks), DY)
    assert_close(y, ref.attention(*heads, **host).out[:, 0])
    want = ref.attention_gradients(DY[:, None], *heads, **host)
    for gradient, expected in zip(got, (*(dx[:, 0] for dx in want[:3]), *want[3:]), strict=True):
        assert_close(gradient, expected)


def test_layer(differentiate, backend, make, to_np):
    layer = pa.MultiHeadAttention(6, 2, dtype="float64", backend=backend)
    names = list(layer.parameters())
    hosts = [to_np(parameter) for parameter in layer.parameters().values()]

    def function(x, *parameters):
        return layer.with_parameters(dict(zip(names, parameters, strict=True)))(x, causal=True)

    y, (dx, *grads) = differentiate(function, (X, *hosts), DY)
    parameters = dict(zip(names, hosts, strict=True))
    assert_close(y, ref.multi_head_attention(parameters, X, X, X, num_heads=2, causal=True))
    slopes, want = ref.multi_head_attention_gradients(DY, parameters, X, X, X, num_heads=2, causal=True)
    assert_close(dx, sum(slopes))
    for name, gradient in zip(names, grads, strict=True):
        assert_close(gradient, want[name], scale=1.0 if name == "k_proj.bias" else None, what=name)


def test_block(differentiate, backend, to_np):
    """The library's differentiation calls the hand-written backward, with positions and sinks."""
    layer = pa.TransformerBlock(
        6, 3, rotary=True, qk_norm="rms", sinks=True, activation="swiglu", dtype="float64", backend=backend
    )
    names = list(layer.parameters())
    hosts = [to_np(parameter) for parameter in layer.parameters().values()]

    def function(x, *parameters):
        return layer.with_parameters(dict(zip(names, parameters, strict=True)))(x, causal=True)

    y, (dx, *grads) = differentiate(function, (X, *hosts), DY)
    there = layer.to("numpy")
    want_y, cache = there.forward(X, causal=True)
    want, want_grads = there.backward(DY, cache)
    assert_close(y, want_y)
    assert_close(dx, want.x)
    for name, gradient in zip(names, grads, strict=True):
        assert_close(gradient, want_grads[name], scale=1.0 if name.endswith("k_proj.bias") else None, what=name)
