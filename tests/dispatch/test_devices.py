"""Devices: unchanged if the selection names none, else the selected one; results are on the inputs' device."""

import numpy as np
import pytest

import polyattn as pa
from polyattn import functional as F
from polyattn import registry

X = np.random.default_rng(2).standard_normal((3, 4))
OTHERS = ("numpy", "torch", "jax")


@pytest.fixture
def far(native):
    """``far(device)``: an array of array-api-strict on one of its simulated devices."""
    pytest.importorskip("array_api_strict", reason="array-api-strict, which has several devices, is not installed")
    strict = registry.load("array-api-strict")
    return lambda device, x=X: native(strict.name, x).to_device(strict.native_device(device))


def device_of(x):
    return registry.owner(x).device_of(x)


def test_nothing_selected_keeps_the_device(far):
    x = far("device1")
    with pa.transfers("forbid"):
        out, cache = pa.attention_forward(x, x, x, causal=True, dropout=0.5, seed=3)
        grads = pa.attention_backward(out, cache)
    assert {device_of(a) for a in (out, cache.lse, *grads[:3])} == {"device1"}
    assert cache.place.device == "device1"


@pytest.mark.parametrize("length", [3, 0])
def test_a_device_that_lacks_dtypes(far, length):
    """Arrays cannot be moved to it, but those on it are computed there, also without keys."""
    x = far("no_float64", np.ones((3, 4), dtype=np.float32))
    keys = x[:length, :]
    with pa.transfers("forbid"):
        out, cache = pa.attention_forward(x, keys, keys, causal=True)
    assert device_of(out) == device_of(cache.lse) == "no_float64"
    assert "no_float64" not in registry.load("array-api-strict").devices()
    with pytest.raises(pa.BackendUnavailableError, match="no_float64"):
        pa.to_backend(X, "array-api-strict", "no_float64")


def test_the_same_library_selected_without_a_device_keeps_it(far):
    with pa.use_backend("array-api-strict"), pa.transfers("forbid"):
        assert device_of(F.softmax(far("device2"))) == "device2"


def test_a_device_selected(far):
    """Arrays move between devices only because of the selection, and results are moved back."""
    with pa.use_backend("array-api-strict", device="device1"), pa.transfers() as account:
        y, cache = F.softmax_forward(far("device2"))
        (dx,) = F.softmax_backward(y, cache)
    assert cache.place.device == "device1"
    assert device_of(y) == device_of(dx) == "device2"
    assert [str(crossing) for crossing in account.crossings] == [
        "x: array-api-strict on device2 -> array-api-strict on device1 (copied)",
        "softmax: array-api-strict on device1 -> array-api-strict on device2 (copied)",
        "dy: array-api-strict on device2 -> array-api-strict on device1 (copied)",
        "dx: array-api-strict on device1 -> array-api-strict on device2 (copied)",
    ]


@pytest.mark.parametrize("other", OTHERS)
def test_between_a_device_and_another_library(far, other):
    """The other library's default device if it has none of that name; results are copies, and logged as such."""
    if other not in {info.name for info in pa.list_backends() if info.state == "ready"}:
        pytest.skip(f"{other} is not installed")
    x = far("device1")
    with pa.use_backend(other), pa.transfers() as account:
        y, cache = F.softmax_forward(x)
    assert cache.place.device == "cpu"
    assert device_of(y) == "device1"
    assert [crossing.copied for crossing in account.crossings] == [True, True]
    with pa.use_backend("array-api-strict", device="device1"):
        z, cache = F.softmax_forward(pa.to_backend(X, other))
    assert registry.owner(z).name == other
    assert cache.place.device == "device1"


def test_copies_to_and_from_a_device_are_refused_where_forbidden(far):
    for x, name, device in ((far("device1"), "numpy", None), (far("cpu"), "array-api-strict", "device1"),
                            (X.copy(), "array-api-strict", "device1")):  # fmt: skip
        with pytest.raises(pa.BackendMismatchError, match=r"x: .*copy=None"):
            pa.to_backend(x, name, device, copy=False)


def test_a_device_has_memory_of_its_own(far):
    x = X.copy()
    there = pa.to_backend(x, "array-api-strict", "device1")
    x[...] = 9.0
    np.testing.assert_array_equal(pa.to_backend(there, "numpy"), X)


def test_mixed_devices(far):
    q, k = far("device1"), far("device2")
    for selection in (None, "numpy", "array-api-strict"):
        with pytest.raises(
            pa.BackendMismatchError, match=r"q is array-api-strict on device1, k is .* device2, v is .*1"
        ):
            pa.attention(q, k, q, backend=selection)
    with pytest.raises(pa.BackendMismatchError, match=r"x is array-api-strict on device1, weight is array-api-s.* cpu"):
        F.linear(q, far("cpu", np.ones((4, 4))))
    _, cache = F.softmax_forward(q)
    with pytest.raises(pa.BackendMismatchError, match=r"dy: .* on array-api-strict on device1, got one on .* device2"):
        F.softmax_backward(k, cache)


def test_layers_on_devices(far):
    layer = pa.Projection(4, 3, dtype="float64", backend="array-api-strict", device="device1")
    assert layer.device == device_of(layer.parameters()["weight"]) == "device1"
    y, cache = layer.forward(X)
    inputs, grads = layer.backward(y, cache)
    assert type(inputs[0]) is np.ndarray
    assert device_of(grads["weight"]) == "device1"
    assert device_of(layer(far("device2"))) == "device2"
    moved = layer.to("array-api-strict")  # no device named: it stays
    assert moved.device == "device1"
    moved = layer.to("array_api_strict", device="DEVICE2")
    assert moved.device == device_of(moved.parameters()["bias"]) == "device2"
    with pytest.raises(pa.BackendMismatchError, match="weight: expected an array of array-api-strict on device1"):
        layer.with_parameters(moved.parameters())


def test_the_variables_name_a_device(far, monkeypatch):
    monkeypatch.setenv("POLYATTN_BACKEND", "array-api-strict")
    monkeypatch.setenv("POLYATTN_DEVICE", "device2")
    assert F.softmax_forward(X)[1].place.device == "device2"
    assert pa.LayerNorm(4).device == "device2"


def test_two_host_devices_of_jax(program):
    """JAX numbers its host devices: cpu and cpu:1. Each computes what it was selected for; flags are true."""
    pytest.importorskip("jax", reason="jax is not installed")
    program("jax_two_devices", XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
