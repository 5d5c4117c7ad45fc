"""MLX's own differentiation calls polyattn's backward."""

import mlx.core as mx
import numpy as np
import pytest

import polyattn as pa

X = np.random.default_rng(1).standard_normal((2, 4, 6, 8), dtype=np.float32)


def ours(x):
    return mx.sum(mx.square(pa.attention(x, x, x, causal=True)))


def plain(x):
    """The formula in MLX, differentiated by MLX."""
    scores = x @ mx.swapaxes(x, -1, -2) * x.shape[-1] ** -0.5  # (2, 4, 6, 6)
    scores = mx.where(mx.tril(mx.ones((6, 6))) > 0, scores, -mx.inf)
    return mx.sum(mx.square(mx.softmax(scores, axis=-1) @ x))


def slope(function):
    """A scalar function of the gradient, for second derivatives."""
    return lambda x: mx.sum(mx.square(mx.grad(function)(x)))


def close(got, want):
    np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-4, atol=1e-4)


def test_grad():
    close(mx.grad(ours)(mx.array(X)), mx.grad(plain)(mx.array(X)))


def test_grad_of_grad():
    close(mx.grad(slope(ours))(mx.array(X)), mx.grad(slope(plain))(mx.array(X)))


def test_jvp():
    close(*(mx.jvp(function, [mx.array(X)], [mx.ones(X.shape)])[1][0] for function in (ours, plain)))


@pytest.mark.parametrize("transform", [lambda f: f, mx.grad], ids=["value", "grad"])
def test_vmap(transform):
    close(*(mx.vmap(transform(function))(mx.array(X)) for function in (ours, plain)))


def test_a_layer_in_a_model_of_mlx():
    """MLX's gradients of parameters and input equal those of the hand-written backward."""
    layer = pa.MultiHeadAttention(8, 2, backend="mlx", seed=0)
    x = mx.array(X[0])

    def loss(parameters, x):
        return mx.sum(mx.square(layer.with_parameters(parameters)(x, causal=True)))

    by_mlx, dx = mx.grad(loss, argnums=(0, 1))(layer.parameters(), x)
    y, cache = layer.forward(x, causal=True)
    inputs, grads = layer.backward(2 * y, cache)
    close(dx, inputs.query)
    for name, grad in grads.items():
        close(by_mlx[name], grad)


def test_operations_differentiate():
    for operation in (pa.functional.softmax, pa.functional.relu, pa.functional.gelu, pa.functional.layer_norm):
        x = mx.array(X[0, 0])
        y, cache = getattr(pa.functional, f"{operation.__name__}_forward")(x)
        by_hand = getattr(pa.functional, f"{operation.__name__}_backward")(mx.cos(y), cache)[0]
        close(mx.grad(lambda x, f=operation: mx.sum(mx.sin(f(x))))(x), by_hand)
