"""Results are of the inputs' library: for each library of inputs, each selected backend, and each operation."""

import logging

import numpy as np
import pytest

import polyattn as pa
from polyattn import functional as F
from polyattn import registry
from polyattn.backend import dtype_name

RNG = np.random.default_rng(11)
X, W, B = RNG.standard_normal((2, 4, 4)), RNG.standard_normal((4, 4)), RNG.standard_normal(4)
LABELS = np.array([[0, 3, 1, 1], [2, 2, 0, 3]])
MASK = np.tril(np.ones((4, 4), dtype=bool))

# The inputs of each operation, in the order of its gradients; then what else it is given.
OPERATIONS = {
    "softmax": ([X], {}),
    "linear": ([X, W, B], {}),
    "layer_norm": ([X, B, B], {}),
    "rms_norm": ([X, B], {}),
    "log_softmax": ([X], {}),
    "relu": ([X], {}),
    "silu": ([X], {}),
    "swiglu": ([X, X[::-1]], {}),
    "geglu": ([X, X[::-1]], {}),
    "embedding": ([LABELS, W], {}),
    "gelu": ([X], {}),
    "mse_loss": ([X, X[::-1]], {}),
    "cross_entropy": ([X, LABELS], {"weight": B**2}),
    "attention": (
        [X[:, None]] * 3,
        {"causal": True, "mask": MASK, "bias": W, "sinks": B[:1], "key_lengths": np.array([4, 2])},
    ),
}


@pytest.fixture
def made(native):
    """Return ``made(name, tree)``: every array of a list or dict as one of that library."""

    def convert(name, x):
        if isinstance(x, dict):
            return {key: convert(name, value) for key, value in x.items()}
        if isinstance(x, list):
            return [convert(name, value) for value in x]
        return native(name, x) if isinstance(x, np.ndarray) else x

    return convert


def arrays_of(*trees):
    for tree in trees:
        values = tree.values() if isinstance(tree, dict) else tree
        yield from (x for x in values if hasattr(x, "shape"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name, home, place, made, host):
    """Results and gradients are the inputs' library's, right, on the inputs' device; so are row statistics."""
    inputs, arguments = OPERATIONS[name]
    backward = getattr(F, f"{name}_backward")
    expected, there = getattr(F, f"{name}_forward")(*inputs, **arguments)
    dy = RNG.standard_normal(expected.shape)
    dxs = backward(np.asarray(dy), there)

    given, extra = made(home, inputs), made(home, arguments)
    before = [host(x) for x in arrays_of(given, extra)]
    with pa.use_backend(place), pa.transfers() as account:
        y, cache = getattr(F, f"{name}_forward")(*given, **extra)
        short = getattr(F, name)(*given, **extra)
    assert str(cache.place) == f"{place} on cpu"
    assert str(cache.home) == f"{home} on cpu"
    with pa.transfers() as back:
        grads = backward(made(home, dy), cache)
    results = [y, short, *(grad for grad in grads if grad is not None)]
    wanted = [expected, expected, *(dx for dx in dxs if dx is not None)]
    if name == "attention":
        results.append(cache.lse)
        wanted.append(there.lse)
    for result, value in zip(results, wanted, strict=True):
        assert registry.load(home).owns(result)
        assert registry.load(home).device_of(result) == "cpu"
        assert dtype_name(result.dtype) == "float64"
        assert tuple(result.shape) == value.shape
        np.testing.assert_allclose(host(result), value, rtol=1e-11, atol=1e-13)
        if home == "numpy":
            assert result.flags.writeable
    for x, value in zip(arrays_of(given, extra), before, strict=True):
        np.testing.assert_array_equal(host(x), value)
    arrays = len(before)
    assert account.count == (0 if home == place else 2 * arrays + 2 + 2 * (name == "attention"))
    assert back.count == (0 if home == place else 1 + sum(grad is not None for grad in grads))
    assert {crossing.source for crossing in account.crossings} <= {f"{home} on cpu", f"{place} on cpu"}


def test_weights_and_merge(home, place, made, host):
    x = made(home, X)
    halves = [(slice(0, 1),), (slice(1, 4),)]
    with pa.use_backend(place):
        weights = pa.attention_weights(x, x, mask=made(home, MASK))
        parts = [pa.attention_forward(x, x[:, s[0], :], x[:, s[0], :]) for s in halves]
        out, lse = pa.attention_merge([(part, cache.lse) for part, cache in parts])
    assert all(registry.load(home).owns(result) for result in (weights, out, lse))
    np.testing.assert_allclose(host(weights), pa.attention_weights(X, X, mask=MASK), rtol=1e-11)
    whole, cache = pa.attention_forward(X, X, X)
    np.testing.assert_allclose(host(out), whole, rtol=1e-11)
    np.testing.assert_allclose(host(lse), cache.lse, rtol=1e-11)


LAYERS = {
    "Projection": lambda **bound: pa.Projection(4, 3, **bound),
    "LayerNorm": lambda **bound: pa.LayerNorm(4, **bound),
    "RMSNorm": lambda **bound: pa.RMSNorm(4, **bound),
    "FeedForward": lambda **bound: pa.FeedForward(4, 6, activation="swiglu", **bound),
    "ScaledDotProductAttention": lambda **bound: pa.ScaledDotProductAttention(**bound),
    "MultiHeadAttention": lambda **bound: pa.MultiHeadAttention(4, 2, **bound),
    "TransformerBlock": lambda **bound: pa.TransformerBlock(4, 2, rotary=True, qk_norm="rms", sinks=True, **bound),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, home, place, made, host):
    """A bound layer returns arrays of the inputs' library; parameter gradients are where the parameters are."""
    count = 3 if name == "ScaledDotProductAttention" else 1
    plain = LAYERS[name](dtype="float64")
    expected, there = plain.forward(*[X] * count)
    dxs, dparameters = plain.backward(np.ones_like(expected), there)

    layer = LAYERS[name](dtype="float64", backend=place)
    given = [made(home, X)] * count
    y, cache = layer.forward(*given)
    inputs, grads = layer.backward(made(home, np.ones(expected.shape)), cache)
    results = [y, layer(*given), *(dx for dx in inputs if dx is not None)]
    wanted = [expected, expected, *(dx for dx in dxs if dx is not None)]
    for result, value in zip(results, wanted, strict=True):
        assert registry.load(home).owns(result)
        np.testing.assert_allclose(host(result), value, rtol=1e-11, atol=1e-13)
    assert grads.keys() == layer.parameters().keys()
    for key, grad in grads.items():
        assert registry.load(place).owns(grad)
        np.testing.assert_allclose(host(grad), dparameters[key], rtol=1e-11, atol=1e-13)


def test_embedding_layer(home, place, made, host):
    """The inputs are integers and have no gradient."""
    layer = pa.Embedding(4, 3, dtype="float64", backend=place)
    weight = host(layer.parameters()["weight"])
    y, cache = layer.forward(made(home, LABELS))
    inputs, grads = layer.backward(made(home, np.ones((2, 4, 3))), cache)
    for result in (y, layer(made(home, LABELS))):
        assert registry.load(home).owns(result)
        np.testing.assert_array_equal(host(result), weight[LABELS])
    assert inputs.indices is None
    assert registry.load(place).owns(grads["weight"])
    np.testing.assert_array_equal(host(grads["weight"])[:, 0], np.bincount(LABELS.reshape(-1)))


def test_a_layer_that_moves(home, place, made, host):
    """A layer that is bound by default rejects other libraries, and the error names a remedy that works."""
    layer = pa.Projection(4, 3, dtype="float64")
    x = made(home, X)
    if home != "numpy":
        with pytest.raises(pa.BackendMismatchError, match=rf"layer\.to\('{home}', device=None\)"):
            layer(x)
    moved = layer.to(place)
    assert registry.load(home).owns(moved(x))
    np.testing.assert_allclose(host(moved(x)), layer(X), rtol=1e-12)
    again = moved.to("numpy")
    np.testing.assert_array_equal(again.parameters()["weight"], layer.parameters()["weight"])


def test_parameters_go_by_file_and_by_dict(home, place, tmp_path, host):
    """A layer loads what a layer on another backend saved; its arrays are of its own library."""
    first = pa.Projection(4, 3, dtype="float64", seed=5, backend=home)
    first.save(tmp_path / "layer.safetensors")
    for load in ("load", "load_parameters"):
        second = pa.Projection(4, 3, dtype="float64", seed=6, backend=place)
        getattr(second, load)(tmp_path / "layer.safetensors" if load == "load" else first.parameters())
        for name, x in second.parameters().items():
            assert registry.load(place).owns(x)
            np.testing.assert_array_equal(host(x), host(first.parameters()[name]))


def test_a_backward_elsewhere_selected(home, place, made):
    """The backward runs where the forward ran, whatever is selected then."""
    y, cache = F.softmax_forward(made(home, X))
    with pa.use_backend(place), pa.transfers("forbid"):
        (dx,) = F.softmax_backward(y, cache)
    assert registry.load(home).owns(dx)


def test_dy_of_another_library(home, place, made):
    _, cache = F.softmax_forward(made(home, X))
    if home == place:
        return
    with pytest.raises(pa.BackendMismatchError, match=f"dy: .* like the inputs, on {home} on cpu, got one on {place}"):
        F.softmax_backward(made(place, X), cache)


def test_mixed_libraries(home, place, made):
    """Each argument is named with its library and device, whatever is selected."""
    if home == place:
        return
    q, k = made(home, X), made(place, X)
    for selected in (None, home, place):
        with pytest.raises(pa.BackendMismatchError, match=f"q is {home} on cpu, k is {place} on cpu, v is {home} on"):
            pa.attention(q, k, q, backend=selected)
    with pytest.raises(pa.BackendMismatchError, match=f"q is {home} on cpu, .* mask is {place} on cpu"):
        pa.attention(q, q, q, mask=made(place, MASK))


def test_forbidden_transfers(home, place, made, caplog):
    """They raise before any transfer; allowed ones are in the log if one was passed."""
    x = made(home, X)
    with pa.transfers("forbid") as account:
        F.softmax(x)
        if home != place:
            with pytest.raises(pa.BackendMismatchError, match=f"x: would go from {home} on cpu to {place} on cpu"):
                pa.Projection(4, 3, dtype="float64", backend=place)(x)
    assert account.count == 0
    with caplog.at_level(logging.INFO, logger="polyattn"), pa.transfers("log"), pa.use_backend(place):
        F.softmax(x)
    lines = [message.split(" (")[0] for message in caplog.messages]
    crossed = [f"transfer x: {home} on cpu -> {place} on cpu", f"transfer softmax: {place} on cpu -> {home} on cpu"]
    assert lines == ([] if home == place else crossed)
