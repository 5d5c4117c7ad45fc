"""The layers around attention: root-mean-square norm, embedding and feed-forward."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.backend import dtype_name
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

RNG = np.random.default_rng(37)
X, DY = RNG.standard_normal((2, 5, 8)), RNG.standard_normal((2, 5, 8))
PLAIN: dict[str, Any] = {
    "gelu": (ref.gelu, ref.gelu_gradient),
    "relu": (ref.relu, ref.relu_gradient),
    "silu": (ref.silu, ref.silu_gradient),
}
GATED: dict[str, Any] = {
    "swiglu": (ref.swiglu, ref.swiglu_gradients),
    "geglu": (ref.geglu, ref.geglu_gradients),
}


def test_rms_norm(target: Any, contract: Any, backend: Any, make: Any, to_np: Any) -> None:
    layer = pa.RMSNorm(8, eps=1e-3, dtype="float64", backend=backend, device=target.device)
    np.testing.assert_array_equal(to_np(layer.parameters()["weight"]), np.ones(8))
    weight = RNG.standard_normal(8)
    layer = layer.with_parameters({"weight": make(weight)})
    y, cache = layer.forward(make(X))
    for result in (y, layer(make(X))):
        assert_close(to_np(result), ref.rms_norm(X, weight, 1e-3))
    dx, grads = layer.backward(make(DY), cache)
    want = ref.rms_norm_gradients(DY, X, weight, 1e-3)
    assert_close(to_np(dx.x), want[0])
    assert_close(to_np(grads["weight"]), want[1])


def test_embedding(target: Any, contract: Any, backend: Any, make: Any, to_np: Any) -> None:
    layer = pa.Embedding(6, 8, dtype="float64", backend=backend, device=target.device, seed=5)
    weight = to_np(layer.parameters()["weight"])
    np.testing.assert_array_equal(weight, pa.Embedding(6, 8, dtype="float64", seed=5).parameters()["weight"])
    indices = RNG.integers(0, 6, (2, 5))
    y, cache = layer.forward(make(indices, "int32"))
    for result in (y, layer(make(indices, "int32"))):
        np.testing.assert_array_equal(to_np(result), weight[indices])
    inputs, grads = layer.backward(make(DY), cache)
    assert inputs.indices is None
    assert_close(to_np(grads["weight"]), ref.embedding_gradient(DY, indices, weight))


@pytest.fixture
def build(contract: Any, backend: Any, target: Any, to_np: Any) -> Any:
    """Return ``build(**settings)``: a feed-forward layer 8-12-8 with nonzero biases, and its parameters."""

    def build(dtype: Any = "float64", **settings: Any) -> Any:
        layer = pa.FeedForward(8, 12, dtype=dtype, backend=backend, device=target.device, seed=3, **settings)
        rng = np.random.default_rng(4)
        hosts = {name: to_np(p) + 0.1 * rng.standard_normal(p.shape) for name, p in layer.parameters().items()}
        layer = layer.with_parameters({n: target.make(p, dtype) for n, p in hosts.items()})
        return layer, {name: to_np(p).astype(np.float64) for name, p in layer.parameters().items()}

    return build


def reference(p: Any, x: Any, activation: Any, dy: Any = DY) -> Any:
    """Return the value, the gradient of x, and those of the parameters by name."""
    names = (["gate_proj"] if activation in GATED else []) + ["up_proj"]
    value, slope = (PLAIN | GATED)[activation]
    halves = [ref.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias")) for name in names]
    inner = value(*halves)
    y = ref.linear(inner, p["down_proj.weight"], p.get("down_proj.bias"))
    dinner, dweight, dbias = ref.linear_gradients(dy, inner, p["down_proj.weight"])
    grads = {"down_proj.weight": dweight, "down_proj.bias": dbias}
    dhalves = slope(dinner, *halves)
    dx: Any = 0.0
    for name, dhalf in zip(names, dhalves if activation in GATED else [dhalves], strict=True):
        more, grads[f"{name}.weight"], grads[f"{name}.bias"] = ref.linear_gradients(dhalf, x, p[f"{name}.weight"])
        dx = dx + more
    return y, dx, {name: grads[name] for name in p}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", PLAIN | GATED)
def test_feed_forward(build: Any, make: Any, to_np: Any, activation: Any, bias: Any) -> None:
    layer, parameters = build(activation=activation, bias=bias)
    assert list(parameters) == [
        f"{name}.{kind}"
        for name in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "bias")
        if (name != "gate_proj" or activation in GATED) and (kind == "weight" or bias)
    ]
    y, cache = layer.forward(make(X))
    inputs, grads = layer.backward(make(DY), cache)
    want_y, want_dx, want = reference(parameters, X, activation)
    assert_close(to_np(y), want_y)
    assert_close(to_np(layer(make(X))), want_y)
    assert_close(to_np(inputs.x), want_dx)
    none, same = layer.backward(make(DY), cache, inputs=False)
    assert none == (None,)
    for got in (grads, same):
        assert list(got) == list(want)
        for name, gradient in got.items():
            assert_close(to_np(gradient), want[name], what=name)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_feed_forward_by_central_differences(build: Any, make: Any, to_np: Any, activation: Any) -> None:
    layer, parameters = build(activation=activation)

    def loss(x: Any, *values: Any) -> Any:
        moved = layer.with_parameters({name: make(p) for name, p in zip(parameters, values, strict=True)})
        return float(np.sum(to_np(moved(make(x))) * DY))

    inputs, grads = layer.backward(make(DY), layer.forward(make(X))[1])
    slopes_agree(loss, [X, *parameters.values()], [to_np(inputs.x), *(to_np(g) for g in grads.values())])


def test_feed_forward_in_every_dtype(build: Any, make: Any, to_np: Any, dtype: Any) -> None:
    """All arrays, the hidden one too, are rounded to the dtype: the tolerance is a few times that of one operation."""
    layer, parameters = build(dtype, activation="swiglu")
    x, dy = make(X, dtype), make(DY, dtype)
    y, cache = layer.forward(x)
    inputs, grads = layer.backward(dy, cache)
    want_y, want_dx, want = reference(parameters, to_np(x), "swiglu", to_np(dy))
    results = {"y": (y, want_y), "x": (inputs.x, want_dx), **{name: (grads[name], want[name]) for name in want}}
    for name, (got, expected) in results.items():
        assert dtype_name(got.dtype) == dtype
        scale = 3 * float(np.max(np.abs(expected)))
        assert_close(to_np(got), expected, dtype, scale=scale, what=name)


def test_save_and_load(build: Any, make: Any, to_np: Any, backend: Any, tmp_path: Any) -> None:
    layer, _ = build(activation="geglu")
    layer.save(tmp_path / "layer.safetensors")
    other = pa.FeedForward(**layer.config(), dtype="float64", backend=backend, seed=8)
    other.load(tmp_path / "layer.safetensors")
    np.testing.assert_array_equal(to_np(other(make(X))), to_np(layer(make(X))))
    assert_close(layer.to("numpy")(X), to_np(layer(make(X))))
