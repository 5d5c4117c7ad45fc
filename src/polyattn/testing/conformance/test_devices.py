"""On every device of the backend, arrays are created, computed and returned on that device."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES

RNG = np.random.default_rng(67)
X, DY = RNG.standard_normal((2, 5, 8)), RNG.standard_normal((2, 5, 8))


def places(contract: Any, make: Any) -> Any:
    """Return each device with its ``make``; in float32, which every device supports."""

    def on(device: Any) -> Any:
        return lambda x, dtype="float32": pa.to_backend(make(x, dtype), contract.name, device=device)

    return [(device, on(device)) for device in contract.devices()]


def fetch(contract: Any, device: Any, *arrays: Any) -> Any:
    """Check the device of the arrays, and return them on the host."""
    for x in arrays:
        assert contract.device_of(x) == device
    return [np.asarray(pa.to_backend(x, "numpy"), dtype=np.float64) for x in arrays]


def test_attention(contract: Any, make: Any) -> None:
    problem = next(case for case in CASES if case.name == "everything").problem()
    keep = ref.keep_mask((2, 4, 5, 7), 0.25, 3)
    for device, on in places(contract, make):
        (inputs, arguments), dout = problem.native(on, "float32"), on(problem.dout)
        with pa.transfers("forbid"):
            out, cache = pa.attention_forward(*inputs, dropout=0.25, seed=3, **arguments)
            grads = pa.attention_backward(dout, cache)
        got = fetch(contract, device, out, cache.lse, *grads)
        answer = ref.attention(*problem.inputs, keep=keep, dropout=0.25, **problem.arguments)
        slopes = ref.attention_gradients(problem.dout, *problem.inputs, keep=keep, dropout=0.25, **problem.arguments)
        for x, want in zip(got, (answer.out, answer.lse, *slopes), strict=True):
            assert_close(x, want, "float32")


def test_poisoned_attention(contract: Any, make: Any) -> None:
    poisoned = X.copy()
    poisoned[:, 3:] = np.nan
    for device, on in places(contract, make):
        out, cache = pa.attention_forward(on(X), on(poisoned), on(poisoned), key_lengths=3)
        grads = pa.attention_backward(on(DY), cache)
        got = fetch(contract, device, out, *grads[:3])
        answer = ref.attention(X, poisoned, poisoned, key_lengths=3)
        slopes = ref.attention_gradients(DY, X, poisoned, poisoned, key_lengths=3)
        for x, want in zip(got, (answer.out, *slopes[:3]), strict=True):
            assert_close(x, want, "float32")


def test_operations(contract: Any, make: Any) -> None:
    functions = pa.functional
    for device, on in places(contract, make):
        for name, value, slope in (
            ("softmax", ref.softmax, ref.softmax_gradient),
            ("layer_norm", ref.layer_norm, lambda dy, x: ref.layer_norm_gradients(dy, x)[0]),
            ("rms_norm", ref.rms_norm, lambda dy, x: ref.rms_norm_gradients(dy, x)[0]),
            ("log_softmax", ref.log_softmax, ref.log_softmax_gradient),
            ("relu", ref.relu, ref.relu_gradient),
            ("silu", ref.silu, ref.silu_gradient),
            ("gelu", ref.gelu, ref.gelu_gradient),
        ):
            y, cache = getattr(functions, f"{name}_forward")(on(X))
            dx = getattr(functions, f"{name}_backward")(on(DY), cache)[0]
            y, dx = fetch(contract, device, y, dx)
            assert_close(y, value(X), "float32", what=name)
            assert_close(dx, slope(DY, X), "float32", what=f"gradient of {name}")


def test_embedding(contract: Any, make: Any) -> None:
    indices, dy = RNG.integers(0, 5, (2, 5)), DY
    for device, on in places(contract, make):
        y, cache = pa.functional.embedding_forward(on(indices, "int32"), on(X[0]))
        dweight = pa.functional.embedding_backward(on(dy), cache).weight
        y, dweight = fetch(contract, device, y, dweight)
        assert_close(y, ref.embedding(indices, X[0]), "float32")
        assert_close(dweight, ref.embedding_gradient(dy, indices, X[0]), "float32")


def test_losses(contract: Any, make: Any) -> None:
    labels = RNG.integers(0, 8, (2, 5))
    for device, on in places(contract, make):
        loss, cache = pa.functional.cross_entropy_forward(on(X), on(labels, "int32"), ignore_index=1)
        slope = pa.functional.cross_entropy_backward(on(0.5), cache).logits
        loss, slope = fetch(contract, device, loss, slope)
        assert_close(loss, ref.cross_entropy(X, labels, ignore_index=1), "float32")
        assert_close(slope, ref.cross_entropy_gradient(0.5, X, labels, ignore_index=1), "float32")
        loss, cache = pa.functional.mse_loss_forward(on(X), on(DY))
        slope = pa.functional.mse_loss_backward(on(1.0), cache).prediction
        loss, slope = fetch(contract, device, loss, slope)
        assert_close(loss, ref.mse_loss(X, DY), "float32")
        assert_close(slope, ref.mse_loss_gradients(1.0, X, DY)[0], "float32")


def test_training_step(contract: Any, make: Any) -> None:
    """A training step of a layer and an optimiser transfers no array to another library or device."""
    for device, on in places(contract, make):
        layer = pa.MultiHeadAttention(8, 2, backend=contract.name, device=device, seed=1)
        assert layer.device == device
        x, target, one = on(X), on(DY), on(1.0)
        optimizer = pa.optim.AdamW(lr=0.1)
        state = optimizer.init(layer.parameters())
        with pa.transfers("forbid") as record:
            y, cache = layer.forward(x, causal=True)
            _, loss_cache = pa.functional.mse_loss_forward(y, target)
            dy = pa.functional.mse_loss_backward(one, loss_cache).prediction
            inputs, grads = layer.backward(dy, cache)
            parameters, state = optimizer.update(grads, state, layer.parameters())
            after = layer.with_parameters(parameters)(x, causal=True)
        assert record.count == 0
        hosts = dict(zip(parameters, fetch(contract, device, *layer.parameters().values()), strict=True))
        before = ref.multi_head_attention(hosts, X, X, X, num_heads=2, causal=True)
        got, *_ = fetch(contract, device, y, inputs.query, after, *parameters.values(), *state.values())
        assert_close(got, before, "float32")
        got, after = fetch(contract, device, y, after)
        assert ref.mse_loss(after, DY) < ref.mse_loss(got, DY)


def test_results_go_home(contract: Any, backend: Any, make: Any) -> None:
    """NumPy arrays are computed on the selected device, and the results are on the host."""
    for device in contract.devices():
        with pa.use_backend(backend, device=device):
            out, cache = pa.attention_forward(*(X.astype(np.float32),) * 3, causal=True)
        assert cache.place.device == device
        grads = pa.attention_backward(DY.astype(np.float32), cache)
        assert type(out) is type(grads.q) is np.ndarray
        assert_close(out, ref.attention(X, X, X, causal=True).out, "float32")
        assert_close(grads.k, ref.attention_gradients(DY, X, X, X, causal=True).k, "float32")


def test_upstream_gradients_of_another_device_are_refused(contract: Any, make: Any) -> None:
    """Neither dout nor dlse is transferred implicitly."""
    (first, here), *others = places(contract, make)
    out, cache = pa.attention_forward(here(X), here(X), here(X))
    for device, there in others:
        for name, gradients in (("dout", {"dout": there(X)}), ("dlse", {"dout": out, "dlse": there(X[..., 0])})):
            with pytest.raises(pa.BackendMismatchError, match=f"{name}: .*{device}"):
                pa.attention_backward(cache=cache, **gradients)
    assert contract.device_of(pa.attention_backward(out, cache, dlse=here(X[..., 0])).q) == first
