"""A layer bound to JAX is a pytree: its parameters are the leaves, in their order and under their names."""

import copy
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close

X = np.random.default_rng(3).standard_normal((2, 5, 8))
LAYERS = {
    "Projection": lambda **more: pa.Projection(8, 8, **more),
    "Embedding": lambda **more: pa.Embedding(5, 8, **more),
    "LayerNorm": lambda **more: pa.LayerNorm(8, **more),
    "RMSNorm": lambda **more: pa.RMSNorm(8, **more),
    "FeedForward": lambda **more: pa.FeedForward(8, 12, activation="swiglu", **more),
    "ScaledDotProductAttention": lambda **more: pa.ScaledDotProductAttention(scale=0.5, **more),
    "MultiHeadAttention": lambda **more: pa.MultiHeadAttention(8, 2, rotary={"base": 100.0}, window=(2, 0), **more),
    "TransformerBlock": lambda **more: pa.TransformerBlock(8, 2, sinks=True, norm="rms", **more),
}


def made(name, **more):
    return LAYERS[name](backend="jax", dtype="float64", **more)


def block(seed=0, **more):
    return pa.TransformerBlock(8, 2, backend="jax", dtype="float64", seed=seed, **more)


@pytest.mark.parametrize("name", LAYERS)
def test_leaves_are_the_parameters(name):
    layer = made(name)
    leaves, tree = jax.tree.flatten(layer)
    parameters = layer.parameters()
    assert len(leaves) == len(parameters)
    assert all(leaf is parameter for leaf, parameter in zip(leaves, parameters.values(), strict=True))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path({"layer": layer})]
    assert paths == [f"['layer']['{key}']" for key in parameters]
    again = jax.tree.unflatten(tree, leaves)
    assert type(again) is type(layer)
    assert repr(again) == repr(layer)
    assert jax.tree.structure(again) == tree
    assert hash(jax.tree.structure(again)) == hash(tree)


@pytest.mark.parametrize("name", LAYERS)
def test_leaves_may_be_anything(name):
    """JAX puts placeholders into its trees: None, objects, shapes."""
    layer = made(name)
    for leaf in (None, object(), 1.5, "text"):
        other = jax.tree.map(lambda _, leaf=leaf: leaf, layer)
        assert list(other.parameters()) == list(layer.parameters())
        assert all(x is leaf for x in other.parameters().values())
        assert not other.parameters() or "=" in repr(other)
    shapes = jax.eval_shape(lambda layer: layer, layer)
    assert all(x.shape == shapes.parameters()[key].shape for key, x in layer.parameters().items())


def test_what_is_static_tells_layers_apart():
    """Seeds and values do not; what changes the result does. A tree keeps no parameter alive."""
    tree = jax.tree.structure(block())
    assert jax.tree.structure(block(seed=1)) == tree
    for other in (
        block(norm_first=False), block(norm="rms"), block(rotary=True), block(rotary={"base": 5.0}),
        block(activation="relu"), block(window=(1, 0)), block(bias=False), block(scale=0.3),
        pa.TransformerBlock(8, 2, backend="jax", dtype="float32"),
        pa.MultiHeadAttention(8, 2, backend="jax", dtype="float64"),
    ):  # fmt: skip
        assert jax.tree.structure(other) != tree
    layer = block()
    tree, kept = jax.tree.structure(layer), weakref.ref(layer.parameters()["norm1.weight"])
    del layer
    gc.collect()
    assert kept() is None


def test_copies_pickles_and_moved_layers_are_pytrees():
    layer = made("MultiHeadAttention")
    there = LAYERS["MultiHeadAttention"](dtype="float64").to("jax")
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), there):
        assert jax.tree.structure(other) == jax.tree.structure(layer)
        for got, want in zip(jax.tree.leaves(other), jax.tree.leaves(layer), strict=True):
            np.testing.assert_array_equal(got, want)


def test_one_program_serves_layers_that_are_alike():
    traces = []

    @jax.jit
    def call(layer, x):
        traces.append(layer)
        return layer(x) if isinstance(layer, pa.Projection) else layer(x, causal=True)

    for seed in (0, 1):
        layer = made("MultiHeadAttention", seed=seed)
        assert_close(np.asarray(call(layer, jnp.asarray(X))), layer.to("numpy")(X, causal=True))
    assert len(traces) == 1
    call(made("Projection"), jnp.asarray(X))
    assert len(traces) == 2


def test_gradients_have_the_layer_s_shape():
    """They are those of the hand-written backward, which runs on traced arrays, too."""
    layer = made("MultiHeadAttention", qk_norm="rms")

    @jax.jit
    def both(layer, x):
        y, cache = layer.forward(x, causal=True)
        inputs, grads = layer.backward(2 * y, cache)
        by_jax = jax.grad(lambda layer, x: jnp.sum(layer(x, causal=True) ** 2), argnums=(0, 1))(layer, x)
        return by_jax, (layer.with_parameters(grads), inputs.query)

    got, want = both(layer, jnp.asarray(X))
    assert type(got[0]) is pa.MultiHeadAttention
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, dx), expected in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert_close(np.asarray(dx), np.asarray(expected), scale=1.0, what=jax.tree_util.keystr(path))


def test_a_loop_of_updates():
    """Trees of parameters, gradients and moments are added up by ``jax.tree.map``, and the loss falls."""

    def loss(layer, x):
        return pa.functional.mse_loss(layer(x), jnp.flip(x, axis=0))

    @jax.jit
    def step(layer, moments, x):
        value, grads = jax.value_and_grad(loss)(layer, x)
        moments = jax.tree.map(lambda m, dp: 0.9 * m + dp, moments, grads)
        return jax.tree.map(lambda p, m: p - 0.05 * m, layer, moments), moments, value

    layer, x = made("FeedForward"), jnp.asarray(X)
    moments, losses = jax.tree.map(jnp.zeros_like, layer), []
    for _ in range(20):
        layer, moments, value = step(layer, moments, x)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 2
    assert isinstance(layer.parameters()["up_proj.weight"], jax.Array)


def test_a_scan_over_layers_and_a_map_over_an_ensemble():
    layers = [made("MultiHeadAttention", seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    x = jnp.asarray(X)

    def losses(stacked):
        each = jax.vmap(lambda layer: layer(x, causal=True))(stacked)
        return jnp.sum(each**2), each

    @jax.jit
    def run(stacked):
        deep = jax.lax.scan(lambda h, layer: (layer(h, causal=True), None), x, stacked)[0]
        return deep, jax.grad(losses, has_aux=True)(stacked)

    h, (deep, (grads, wide)) = X, run(stacked)
    for i, layer in enumerate(layers):
        there = layer.to("numpy")
        y, cache = there.forward(X, causal=True)
        assert_close(np.asarray(wide[i]), y)
        want = there.backward(2 * y, cache)[1]
        for name, dx in grads.parameters().items():
            assert_close(np.asarray(dx[i]), want[name], scale=1.0, what=name)
        h = there(h, causal=True)
    assert_close(np.asarray(deep), h)


def test_decoding_in_a_scan():
    """The layer and its key-value cache go through the loop; token by token it is the call on the whole."""
    layer = made("MultiHeadAttention")
    cache = pa.KVCache.create(2, 2, 5, 4, dtype="float64", backend="jax")

    @jax.jit
    def decode(layer, cache, x):
        def step(cache, token):
            y, cache = layer.decode(token[:, None], cache)
            return cache, y[:, 0]

        return jax.lax.scan(step, cache, x.swapaxes(0, 1))

    cache, y = decode(layer, cache, jnp.asarray(X))
    assert_close(np.asarray(y).swapaxes(0, 1), layer.to("numpy")(X, causal=True))
    assert cache.lengths.tolist() == [5, 5]


def test_a_layer_that_is_bound_elsewhere():
    """JAX may take it apart, but not compute with it; the message says how to bind it."""
    made("Projection")
    layer = pa.Projection(8, 8, dtype="float64")
    with pytest.raises(pa.BackendMismatchError, match=r"made on numpy on cpu by default .* layer\.to\('jax'"):
        jax.jit(lambda layer, x: layer(x))(layer, X)
