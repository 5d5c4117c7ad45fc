"""The layers: values, gradients of inputs and parameters, and the handling of parameters."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.backend import dtype_name
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

RNG = np.random.default_rng(31)
X, CONTEXT, VALUES = (RNG.standard_normal((2, n, 8)) for n in (5, 7, 7))
DY = RNG.standard_normal((2, 5, 8))

VARIANTS: dict[str, Any] = {
    "defaults": {},
    "no-bias": {"bias": False},
    "grouped": {"num_kv_heads": 2},
    "head-dim": {"head_dim": 3, "value_dim": 5},
    "model-scale": {"scale": "model"},
    "own-scale": {"scale": 0.3},
}


@pytest.fixture
def build(contract: Any, backend: Any, target: Any, to_np: Any) -> Any:
    """Return ``build(**settings)``: a layer of width 8 with 4 heads and nonzero biases, and its parameters."""

    def build(dtype: Any = "float64", **settings: Any) -> Any:
        layer = pa.MultiHeadAttention(8, 4, dtype=dtype, backend=backend, device=target.device, seed=3, **settings)
        rng = np.random.default_rng(4)
        hosts = {name: to_np(p) + 0.1 * rng.standard_normal(p.shape) for name, p in layer.parameters().items()}
        layer = layer.with_parameters({n: target.make(p, dtype) for n, p in hosts.items()})
        return layer, {name: to_np(p).astype(np.float64) for name, p in layer.parameters().items()}

    return build


def reference_settings(settings: Any) -> Any:
    return {"num_heads": 4, "num_kv_heads": settings.get("num_kv_heads"), "scale": settings.get("scale")}


def compare(to_np: Any, inputs: Any, grads: Any, want_inputs: Any, want_grads: Any, dtype: Any = "float64") -> Any:
    """Compare every gradient; that of the key's bias is zero by mathematics unless the mask differs by query."""
    for name, want in zip(("query", "key", "value"), want_inputs, strict=True):
        got = getattr(inputs, name)
        assert (got is None) == (want is None), name
        if want is not None:
            assert_close(to_np(got), want, dtype, what=f"gradient of {name}")
    assert set(grads) == set(want_grads)
    for name, want in want_grads.items():
        scale = max(1.0, float(np.max(np.abs(want_grads["q_proj.weight"])))) if name == "k_proj.bias" else None
        assert_close(to_np(grads[name]), want, dtype, scale=scale, what=f"gradient of {name}")


def by_input(inputs: Any, dq: Any, dk: Any, dv: Any) -> Any:
    """Return the gradients of (query, key, value) if inputs are omitted: shared inputs have the sum."""
    if inputs == 1:
        return dq + dk + dv, None, None
    return (dq, dk + dv, None) if inputs == 2 else (dq, dk, dv)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("inputs", [1, 2, 3])
def test_multi_head_attention(build: Any, make: Any, to_np: Any, variant: Any, inputs: Any) -> None:
    """Self- and cross-attention: the gradient of an input that is used several times is the sum."""
    settings = VARIANTS[variant]
    layer, parameters = build(**settings)
    given = (X, CONTEXT, VALUES)[:inputs]
    query, key, value = {1: (X, X, X), 2: (X, CONTEXT, CONTEXT), 3: given}[inputs]
    y, cache = layer.forward(*(make(x) for x in given))
    back, grads = layer.backward(make(DY), cache)
    known = reference_settings(settings)
    assert_close(to_np(y), ref.multi_head_attention(parameters, query, key, value, **known))
    assert_close(to_np(layer(*(make(x) for x in given))), to_np(y))
    (dq, dk, dv), want = ref.multi_head_attention_gradients(DY, parameters, query, key, value, **known)
    compare(to_np, back, grads, by_input(inputs, dq, dk, dv), want)


def test_keys_and_values_of_other_widths(build: Any, make: Any, to_np: Any) -> None:
    layer, parameters = build(d_key=6, d_value=3)
    given = (X, CONTEXT[..., :6], VALUES[..., :3])
    y, cache = layer.forward(*(make(x) for x in given))
    assert_close(to_np(y), ref.multi_head_attention(parameters, *given, num_heads=4))
    back, grads = layer.backward(make(DY), cache)
    compare(to_np, back, grads, *ref.multi_head_attention_gradients(DY, parameters, *given, num_heads=4))
    with pytest.raises(pa.ShapeError, match=r"key: expected \(…, n, 6\), got \(2, 5, 8\)"):
        layer(make(X))
    with pytest.raises(pa.ShapeError, match=r"value: expected \(…, n, 3\), got \(2, 7, 6\)"):
        layer(make(X), make(given[1]))


@pytest.mark.parametrize("inputs", [1, 3])
def test_a_first_layer_needs_no_gradients_of_its_inputs(build: Any, make: Any, to_np: Any, inputs: Any) -> None:
    layer, _ = build()
    _, cache = layer.forward(*(make(x) for x in (X, CONTEXT, VALUES)[:inputs]), bias=make(np.zeros((4, 5, 1))))
    back, want = layer.backward(make(DY), cache)
    none, grads = layer.backward(make(DY), cache, inputs=False)
    assert none[:3] == (None, None, None)
    assert_close(to_np(none.bias), to_np(back.bias))
    assert list(grads) == list(want)
    for name, gradient in grads.items():
        assert_close(to_np(gradient), to_np(want[name]), what=name)


def test_values_of_the_query(build: Any, make: Any, to_np: Any) -> None:
    """``mha(x, c, x)``: query and value are the same input."""
    layer, parameters = build()
    x, context = make(X), make(CONTEXT[:, : X.shape[1]])
    y, cache = layer.forward(x, context, x)
    back, grads = layer.backward(make(DY), cache)
    host = (X, CONTEXT[:, : X.shape[1]], X)
    assert_close(to_np(y), ref.multi_head_attention(parameters, *host, num_heads=4))
    (dq, dk, dv), want = ref.multi_head_attention_gradients(DY, parameters, *host, num_heads=4)
    compare(to_np, back, grads, (dq + dv, dk, None), want)


@pytest.mark.parametrize("inputs", [1, 2])
def test_the_same_array_passed_twice(build: Any, make: Any, to_np: Any, inputs: Any) -> None:
    """``mha(x, x)`` and ``mha(x, c, c)``: the sum of the gradients is the same."""
    layer, parameters = build()
    x, context = make(X), make(CONTEXT)
    given = (x, x) if inputs == 1 else (x, context, context)
    _, cache = layer.forward(*given)
    back, _ = layer.backward(make(DY), cache)
    key = X if inputs == 1 else CONTEXT
    (dq, dk, dv), _ = ref.multi_head_attention_gradients(DY, parameters, X, key, key, num_heads=4)
    of_key = [to_np(dx) for dx in (back[:3] if inputs == 1 else back[1:3]) if dx is not None]
    assert_close(sum(of_key), dq + dk + dv if inputs == 1 else dk + dv)


@pytest.mark.parametrize("name", ["causal", "mask", "bias", "everything"])
def test_attention_arguments(build: Any, make: Any, to_np: Any, name: Any) -> None:
    layer, parameters = build()
    arguments: Any = {
        "causal": {"causal": True},
        "mask": {"mask": np.array([True] * 4 + [False] * 3)},
        "bias": {"bias": RNG.standard_normal((4, 5, 7))},
        "everything": {"causal": True, "window": (3, None), "key_lengths": 6, "softcap": 2.0, "sinks": np.arange(4.0)},
    }[name]
    native = {
        key: make(x, "bool" if x.dtype == bool else "float64") if isinstance(x, np.ndarray) else x
        for key, x in arguments.items()
    }
    y, cache = layer.forward(make(X), make(CONTEXT), **native)
    back, grads = layer.backward(make(DY), cache)
    assert_close(to_np(y), ref.multi_head_attention(parameters, X, CONTEXT, CONTEXT, num_heads=4, **arguments))
    (dq, dk, dv), want = ref.multi_head_attention_gradients(
        DY, parameters, X, CONTEXT, CONTEXT, num_heads=4, **arguments
    )
    compare(to_np, back, grads, (dq, dk + dv, None), want)
    assert (back.bias is None) == (name != "bias")
    if name == "bias":
        assert tuple(back.bias.shape) == (4, 5, 7)


def test_lower_precision(build: Any, make: Any, to_np: Any) -> None:
    layer, parameters = build("float32")
    held = to_np(make(X, "float32")).astype(np.float64)
    y, cache = layer.forward(make(X, "float32"))
    back, grads = layer.backward(make(DY, "float32"), cache)
    dy = to_np(make(DY, "float32")).astype(np.float64)
    assert_close(to_np(y), ref.multi_head_attention(parameters, held, held, held, num_heads=4), "float32")
    slopes, want = ref.multi_head_attention_gradients(dy, parameters, held, held, held, num_heads=4)
    compare(to_np, back, grads, (sum(slopes), None, None), want, "float32")
    assert all(dtype_name(gradient.dtype) == "float32" for gradient in grads.values())


def test_central_differences(build: Any, make: Any, to_np: Any) -> None:
    layer, parameters = build(num_kv_heads=2)
    names = list(parameters)

    def loss(x: Any, *values: Any) -> Any:
        moved = layer.with_parameters({name: make(value) for name, value in zip(names, values, strict=True)})
        return float(np.sum(to_np(moved(make(x), causal=True)) * DY))

    _, cache = layer.forward(make(X), causal=True)
    back, grads = layer.backward(make(DY), cache)
    checked = [name for name in names if name != "k_proj.bias"]
    slopes_agree(
        lambda x, *values: loss(x, *(values[checked.index(n)] if n in checked else parameters[n] for n in names)),
        [X, *(parameters[name] for name in checked)],
        [to_np(back.query), *(to_np(grads[name]) for name in checked)],
    )


def test_gradients_are_those_of_the_weights_that_ran(build: Any, make: Any, to_np: Any) -> None:
    """Replacing parameters between forward and backward does not affect the gradients."""
    layer, parameters = build()
    _, cache = layer.forward(make(X))
    layer.load_parameters({name: make(np.zeros_like(p)) for name, p in parameters.items()})
    back, _ = layer.backward(make(DY), cache)
    slopes, _ = ref.multi_head_attention_gradients(DY, parameters, X, X, X, num_heads=4)
    assert_close(to_np(back.query), sum(slopes))


def test_projection(contract: Any, backend: Any, make: Any, to_np: Any) -> None:
    layer = pa.Projection(8, 3, dtype="float64", backend=backend, seed=5)
    parameters = {name: to_np(p) for name, p in layer.parameters().items()}
    assert {name: p.shape for name, p in parameters.items()} == {"weight": (8, 3), "bias": (3,)}
    y, cache = layer.forward(make(X))
    assert_close(to_np(y), ref.linear(X, parameters["weight"], parameters["bias"]))
    dx, grads = layer.backward(make(DY[..., :3]), cache)
    want = ref.linear_gradients(DY[..., :3], X, parameters["weight"])
    for got, expected in zip((dx[0], grads["weight"], grads["bias"]), want, strict=True):
        assert_close(to_np(got), expected)
    none, grads = layer.backward(make(DY[..., :3]), cache, inputs=False)
    assert none == (None,)
    assert_close(to_np(grads["weight"]), want[1])
    assert set(pa.Projection(8, 3, bias=False, backend=backend).parameters()) == {"weight"}


def test_layer_norm(target: Any, contract: Any, backend: Any, make: Any, to_np: Any) -> None:
    layer = pa.LayerNorm(8, eps=1e-3, dtype="float64", backend=backend, device=target.device)
    hosts = {"weight": RNG.standard_normal(8), "bias": RNG.standard_normal(8)}
    layer = layer.with_parameters({name: make(x) for name, x in hosts.items()})
    y, cache = layer.forward(make(X))
    assert_close(to_np(y), ref.layer_norm(X, hosts["weight"], hosts["bias"], 1e-3))
    dx, grads = layer.backward(make(DY), cache)
    want = ref.layer_norm_gradients(DY, X, hosts["weight"], 1e-3)
    for got, expected in zip((dx[0], grads["weight"], grads["bias"]), want, strict=True):
        assert_close(to_np(got), expected)
    assert set(pa.LayerNorm(8, bias=False, backend=backend).parameters()) == {"weight"}


def test_scaled_dot_product_attention(contract: Any, backend: Any, make: Any, to_np: Any) -> None:
    layer = pa.ScaledDotProductAttention(scale=0.4, dtype="float64", backend=backend)
    q, k, v = X, CONTEXT, CONTEXT[..., :8]
    y, cache = layer.forward(make(q), make(k), make(v), causal=True)
    assert_close(to_np(y), ref.attention(q, k, v, causal=True, scale=0.4).out)
    grads, parameters = layer.backward(make(DY), cache)
    want = ref.attention_gradients(DY, q, k, v, causal=True, scale=0.4)
    for got, expected in zip(grads[:3], want[:3], strict=True):
        assert_close(to_np(got), expected)
    assert parameters == layer.parameters() == {}


@pytest.mark.parametrize("init", ["xavier_uniform", "normal"])
def test_the_same_seed_gives_the_same_parameters_everywhere(contract: Any, backend: Any, to_np: Any, init: Any) -> None:
    for dtype in ("float32", "float64"):
        here = pa.MultiHeadAttention(8, 2, seed=9, init=init, dtype=dtype, backend=backend).parameters()
        there = pa.MultiHeadAttention(8, 2, seed=9, init=init, dtype=dtype, backend="numpy").parameters()
        other = pa.MultiHeadAttention(8, 2, seed=10, init=init, dtype=dtype, backend="numpy").parameters()
        assert list(here) == list(there)
        for name, parameter in here.items():
            assert dtype_name(parameter.dtype) == dtype
            np.testing.assert_array_equal(to_np(parameter), there[name])
        assert (there["q_proj.weight"] != other["q_proj.weight"]).all()


def test_parameters_are_taken_over_whole(contract: Any, backend: Any, make: Any, to_np: Any, tmp_path: Any) -> None:
    layer = pa.MultiHeadAttention(8, 2, dtype="float64", backend=backend, seed=1)
    path = tmp_path / "layer.safetensors"
    layer.save(path)
    other = pa.MultiHeadAttention(8, 2, dtype="float64", backend=backend, seed=2)
    assert not np.array_equal(to_np(other(make(X))), to_np(layer(make(X))))
    other.load(path)
    np.testing.assert_array_equal(to_np(other(make(X))), to_np(layer(make(X))))
    third = pa.MultiHeadAttention(8, 2, dtype="float64", backend=backend, seed=2)
    third.load_parameters(layer.parameters())
    np.testing.assert_array_equal(to_np(third(make(X))), to_np(layer(make(X))))
    moved = layer.to("numpy")
    assert moved.backend == "numpy"
    assert_close(moved(X), to_np(layer(make(X))))


def test_loaded_parameters_are_copies_and_shared_ones_are_not(backend: Any, contract: Any, to_np: Any) -> None:
    layer = pa.Projection(8, 3, bias=False, dtype="float64", backend=backend)
    source = {"weight": RNG.standard_normal((8, 3))}
    kept = source["weight"].copy()
    layer.load_parameters(source)
    source["weight"][...] = 0.0
    np.testing.assert_array_equal(to_np(layer.parameters()["weight"]), kept)
    own = {"weight": pa.to_backend(kept, backend)}
    assert layer.with_parameters(own).parameters()["weight"] is own["weight"]


def test_parameters_of_another_library_are_refused(backend: Any, contract: Any) -> None:
    others = [info.name for info in pa.list_backends() if info.state == "ready" and info.name != contract.name]
    if not others:
        pytest.skip("no other library is installed here, so there are no foreign parameters")
    layer = pa.Projection(8, 3, bias=False, backend=backend)
    foreign = {"weight": pa.to_backend(np.zeros((8, 3), dtype=np.float32), others[0])}
    with pytest.raises(pa.PolyattnError, match="weight"):
        layer.with_parameters(foreign)(np.zeros((2, 8), dtype=np.float32))


def test_wrong_parameters_are_refused(contract: Any, backend: Any, make: Any) -> None:
    layer = pa.Projection(8, 3, dtype="float64", backend=backend)
    good = layer.parameters()
    wrong = (
        {"weight": good["weight"]},
        {**good, "gain": good["bias"]},
        {**good, "bias": make(np.zeros(4))},
        {**good, "bias": make(np.zeros(3), "float32")},
    )
    for parameters in wrong:
        for take in (layer.load_parameters, layer.with_parameters):
            with pytest.raises(pa.PolyattnError, match=r"bias|gain"):
                take(parameters)
