"""JAX differentiates forward, in reverse, and twice: through every operation, and without keeping scores."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import polyattn as pa
from polyattn import functional as F
from polyattn.testing import assert_close
from polyattn.testing.cases import CASES

RNG = np.random.default_rng(17)
X, SQUARE, WIDE = RNG.standard_normal((2, 4, 6)), RNG.standard_normal((6, 6)), RNG.standard_normal(6)
LABELS = np.array([[0, 2, 5, 1], [3, 3, 0, 4]])


def native(x, like):
    return jnp.asarray(x) if isinstance(like, jax.Array) else x


def through(kind, name, x, weight, **call):
    """Return what a layer gives for x with one of its parameters replaced, where the arrays are."""
    layer = kind(6, 3, dtype="float64", backend="jax" if isinstance(x, jax.Array) else None)
    return layer.with_parameters({**layer.parameters(), name: weight})(x, **call)


HEADS = functools.partial(pa.MultiHeadAttention, sinks=True, qk_norm="rms", rotary=True)
OPERATIONS = {
    "softmax": (F.softmax, X),
    "log_softmax": (F.log_softmax, X),
    "linear": (F.linear, X, SQUARE, WIDE),
    "layer_norm": (F.layer_norm, X, WIDE, WIDE[::-1]),
    "rms_norm": (F.rms_norm, X, WIDE),
    "relu": (F.relu, X),
    "gelu": (F.gelu, X),
    "silu": (F.silu, X),
    "swiglu": (F.swiglu, X, X[::-1]),
    "geglu": (F.geglu, X, X[::-1]),
    "rotary_embedding": (F.rotary_embedding, X),
    "embedding": (lambda weight: F.embedding(native(LABELS, weight), weight), SQUARE),
    "mse_loss": (F.mse_loss, X, X[::-1]),
    "cross_entropy": (lambda x, w: F.cross_entropy(x, native(LABELS, x), weight=w), X, np.abs(WIDE)),
    "a layer": (functools.partial(through, HEADS, "k_proj.weight", causal=True), X, SQUARE),
}
DIRECTIONS = {name: [RNG.standard_normal(x.shape) for x in hosts] for name, (_, *hosts) in OPERATIONS.items()}


def difference(name):
    """Return the derivative along the directions, by central differences of the fourth order, on NumPy."""
    (function, *hosts), step = OPERATIONS[name], 1e-3

    def at(times):
        return function(*(x + times * step * u for x, u in zip(hosts, DIRECTIONS[name], strict=True)))

    return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step)


def test_tangents_of_every_operation():
    """What JAX finds by transposing a backward is how the operation moves. One program has them all."""

    @jax.jit
    def tangents(inputs, directions):
        return {name: jax.jvp(OPERATIONS[name][0], x, directions[name]) for name, x in inputs.items()}

    assert {name for name in F.__all__ if f"{name}_forward" in F.__all__} == {*OPERATIONS, "attention"} - {"a layer"}
    inputs = {name: hosts for name, (_, *hosts) in OPERATIONS.items()}
    for name, (y, y_dot) in tangents(inputs, DIRECTIONS).items():
        assert_close(np.asarray(y), OPERATIONS[name][0](*inputs[name]), what=name)
        np.testing.assert_allclose(y_dot, difference(name), atol=1e-8, err_msg=name)


def test_tangents_without_the_compiler():
    x, u = (tuple(map(jnp.asarray, arrays)) for arrays in ((X, SQUARE, WIDE), DIRECTIONS["linear"]))
    y, y_dot = jax.jvp(F.linear, x, u)
    np.testing.assert_allclose(y_dot, difference("linear"), atol=1e-8)
    again, move = jax.linearize(F.linear, *x)
    np.testing.assert_array_equal(again, y)
    np.testing.assert_array_equal(move(*u), y_dot)


# ---- attention -------------------------------------------------------------------------------------------------------

NAMES = ("q", "k", "v", "bias", "sinks")
EVERYTHING = next(case for case in CASES if case.name == "everything").problem()
WITHOUT_BIAS = {name: x for name, x in EVERYTHING.arguments.items() if name != "bias"}
KERNELS = {"jit": EVERYTHING.arguments, "scan": WITHOUT_BIAS}


@pytest.mark.parametrize("kernel", KERNELS)
def test_tangents_of_attention(kernel):
    """They are ``attention_jvp``'s, whichever kernel computes, where a key is excluded and is NaN, too."""
    arguments = dict(KERNELS[kernel])
    inputs = dict(zip(NAMES, [x.copy() for x in EVERYTHING.inputs], strict=False))
    inputs["v"][:, :, 6] = inputs["k"][:, :, 6] = np.nan  # past every length
    inputs |= {name: arguments.pop(name) for name in ("bias", "sinks") if name in arguments}
    moved = {name: RNG.standard_normal(x.shape) for name, x in inputs.items()}
    integers = {name: x for name, x in arguments.items() if isinstance(x, tuple | np.ndarray) and name != "window"}
    settings = {name: x for name, x in arguments.items() if name not in integers}

    @jax.jit
    def tangents(inputs, integers, moved):
        return jax.jvp(lambda x: pa.attention(**x, **integers, **settings, kernel=kernel), (inputs,), (moved,))

    q, k, v = (inputs.pop(name) for name in "qkv")
    ways = tuple(moved.get(name) for name in NAMES)
    want = pa.attention_jvp(q, k, v, ways, **inputs, **arguments)
    got = tangents({"q": q, "k": k, "v": v, **inputs}, integers, moved)
    for what, x, expected in zip(("out", "out_dot"), got, want, strict=True):
        assert_close(np.asarray(x), expected, what=what)


def formula(q, k, v, mask):
    """Return attention as it is written, for JAX to differentiate; a row without keys is zeros."""
    scores = jnp.where(mask, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -1e30)
    return jnp.where(mask.any(-1, keepdims=True), jax.nn.softmax(scores, axis=-1) @ v, 0)


def small():
    """Return q, k, v and a mask that leaves the first query nothing."""
    mask = np.array([[False] * 3, [True, False, True]])
    return *(jnp.asarray(RNG.standard_normal((1, n, 2))) for n in (2, 3, 3)), jnp.asarray(mask)


@pytest.mark.parametrize("kernel", ["tiled", "plain"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_kernels_without_tangents_say_so(kernel, compiled):
    x = jnp.ones((1, 2, 3, 4))

    def tangent(x):
        return jax.jvp(lambda x: pa.attention(x, x, x, kernel=kernel), (x,), (x,))[1]

    with pytest.raises(pa.KernelUnsupportedError, match=r"expected one that supports forward mode.*kernel='jit'"):
        (jax.jit(tangent) if compiled else tangent)(x)


def test_second_derivatives():
    """In every order of forward and reverse; a row that may attend to nothing has none."""
    q, k, v, mask = small()
    u = jnp.asarray(RNG.standard_normal(q.shape))

    def ours(x):
        return jnp.sum(jnp.sin(pa.attention(x, x[:, :1] * k, v, mask=mask)))

    def theirs(x):
        return jnp.sum(jnp.sin(formula(x, x[:, :1] * k, v, mask)))

    def orders(f, x):
        """Return the derivative along u of the gradient: forward over reverse, and in the two other orders."""
        yield jax.jvp(jax.grad(f), (x,), (u,))[1]
        yield jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), u))(x)
        yield jax.grad(lambda x: jax.jvp(f, (x,), (u,))[1])(x)

    want = jax.jit(lambda x: next(orders(theirs, x)))(q)
    for got in jax.jit(lambda x: list(orders(ours, x)))(q):
        assert_close(np.asarray(got), np.asarray(want))


def test_jacobians():
    """One pass forward for each input, or one in reverse for each result."""
    q, k, v, mask = small()
    ways = jax.jit(lambda x: [way(lambda x: pa.attention(x, k, v, mask=mask))(x) for way in (jax.jacfwd, jax.jacrev)])
    forward, reverse = ways(q)
    assert forward.shape == (1, 2, 2, 1, 2, 2)
    assert np.any(np.asarray(forward))
    assert_close(np.asarray(forward), np.asarray(reverse))


def test_no_scores_are_kept():
    """Neither by tangents nor by products with the Hessian: their temporaries are a quarter of one array of scores."""
    n = 8192
    x = jax.ShapeDtypeStruct((1, n, 8), "float32")

    def both(x, u):
        def grad(x):
            return jax.grad(lambda x: jnp.sum(pa.attention(x, x, x) ** 2))(x)

        return jax.jvp(lambda x: pa.attention(x, x, x), (x,), (u,))[1], jax.jvp(grad, (x,), (u,))[1]

    assert jax.jit(both).lower(x, x).compile().memory_analysis().temp_size_in_bytes < n * n * 4 / 4


# ---- under JAX's transformations -----------------------------------------------------------------------------------

Q, K, V = (RNG.standard_normal((3, 2, n, 4)) for n in (4, 5, 5))
MAPPED = {
    "q": {"q": Q},
    "k": {"k": K},
    "v": {"v": V},
    "mask": {"mask": RNG.random((3, 4, 5)) < 0.7},
    "bias": {"bias": RNG.standard_normal((3, 2, 1, 5))},
    "sinks": {"sinks": RNG.standard_normal((3, 2))},
    "key_lengths": {"key_lengths": np.array([5, 0, 3])},
    "q_offset": {"q_offset": np.array([1, -2, 0])},
    "segment_ids": {"segment_ids": (RNG.integers(0, 2, (3, 4)), RNG.integers(0, 2, (3, 5)))},
    "seed": {"seed": np.array([3, 4, 5], np.int32)},
}
STATIC = {"q_offset": {"causal": True}, "seed": {"dropout": 0.5}}


def test_vmap_of_each_argument():
    """Each is mapped alone, the others are not; results are those of a loop."""
    kept = {"q": Q[0], "k": K[0], "v": V[0]}

    @jax.jit
    def mapped(arguments):
        def over(mine, others, static):
            return jax.vmap(lambda mine: pa.attention(**{**others, **mine}, **static))(mine)

        others = jax.tree.map(jnp.asarray, kept)
        return {name: over(mine, others, STATIC.get(name, {})) for name, mine in arguments.items()}

    for name, out in mapped(MAPPED).items():
        for i in range(3):
            mine = {n: tuple(part[i] for part in x) if isinstance(x, tuple) else x[i] for n, x in MAPPED[name].items()}
            assert_close(np.asarray(out[i]), pa.attention(**{**kept, **mine, **STATIC.get(name, {})}), what=name)


def test_gradients_under_vmap_and_around_it():
    """What is not mapped, the keys, gets the sum over the entries where the loss is their sum."""
    mask = MAPPED["mask"]["mask"]

    def loss(k, q, mask, bias):
        return jnp.sum(pa.attention(q, k, jnp.asarray(V[0]), mask=mask, bias=bias) ** 2)

    axes = (None, 0, 0, None)

    @jax.jit
    def both(k, *others):
        each = jax.vmap(jax.grad(loss, argnums=(0, 3)), axes)(k, *others)
        return each, jax.grad(lambda k: jnp.sum(jax.vmap(loss, axes)(k, *others)))(k)

    bias = MAPPED["bias"]["bias"][0]
    (dk, dbias), total = both(K[0], Q, mask, bias)
    for i in range(3):
        out, cache = pa.attention_forward(Q[i], K[0], V[0], mask=mask[i], bias=bias)
        want = pa.attention_backward(2 * out, cache)
        assert_close(np.asarray(dk[i]), want.k)
        assert_close(np.asarray(dbias[i]), want.bias)
    assert_close(np.asarray(total), np.sum(np.asarray(dk), axis=0))


def test_vmap_within_vmap_and_other_axes():
    """The outer maps the batch of q and the heads of k; the inner what is left."""
    want = pa.attention(Q[:, None], K[None], V[:1, None])
    inner = jax.vmap(lambda q, k: pa.attention(q, k, jnp.asarray(V[0])), in_axes=(None, 1))
    got = jax.jit(jax.vmap(inner, in_axes=(2, None)))(np.moveaxis(Q, 0, 2), np.moveaxis(K, 0, 1))
    assert_close(np.asarray(got), want)


def test_scan_over_checkpoints():
    """A loop of checkpointed steps, in reverse and forward, gives what the steps give one after the other."""

    def step(x, scale):
        return x + pa.attention(x, scale * x, x, causal=True), None

    def loss(x, scales):
        checkpointed = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        return jnp.sum(jax.lax.scan(checkpointed, x, scales)[0] ** 3)

    def unrolled(x, scales):
        for scale in scales:
            x, _ = step(x, scale)
        return jnp.sum(x**3)

    x, scales = Q[0], np.array([0.5, 2.0])
    ways = Q[1], np.array([1.0, 3.0])
    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, scales) for f in (loss, unrolled))
    for slope, expected in zip(got, want, strict=True):
        assert_close(np.asarray(slope), np.asarray(expected))
    moved = jax.jit(lambda *x: jax.jvp(loss, x, ways)[1])(x, scales)
    assert_close(float(moved), float(sum(np.vdot(dx, u) for dx, u in zip(want, ways, strict=True))))


def test_an_exported_program():
    """What ``jax.export`` makes of a gradient gives the same, though without the native library."""
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(pa.attention(x, x, x, causal=True) ** 2)))
    x = jnp.asarray(Q[0])
    assert_close(np.asarray(export.export(gradient)(x).call(x)), np.asarray(gradient(x)))
