"""torch's encoder layers, projections and state dicts against ours: values, gradients, and exactly the same weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.interop import weights as W

torch = pytest.importorskip("torch", reason="torch is not installed, so there is nothing to compare with")
interop = pytest.importorskip("polyattn.interop.torch")

X = torch.from_numpy(np.random.default_rng(3).standard_normal((2, 5, 8)))
DY = torch.from_numpy(np.random.default_rng(4).standard_normal((2, 5, 8)))


def moved(module: Any, seed: int = 0) -> Any:
    """Return a module in float64 with all its parameters away from their start."""
    torch.manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def encoder_layer(**options: Any) -> Any:
    return moved(torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, **options))


ENCODER_LAYERS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm_first": True, "activation": "gelu", "layer_norm_eps": 1e-2},
    "bare": {"bias": False, "activation": torch.nn.GELU(approximate="tanh")},
    "silu": {"norm_first": True, "activation": torch.nn.functional.silu},
}


@pytest.mark.parametrize("name", ENCODER_LAYERS)
def test_an_encoder_layer_becomes_ours(backend: str, name: str) -> None:
    module = encoder_layer(**ENCODER_LAYERS[name])
    block: Any = interop.from_module(module, backend=backend)
    x = X.clone().requires_grad_()
    want = module(x)
    want.backward(DY)
    y, cache = block.forward(X)
    torch.testing.assert_close(y, want.detach(), rtol=1e-10, atol=1e-10)
    inputs, grads = block.backward(DY, cache)
    torch.testing.assert_close(inputs.x, x.grad, rtol=1e-9, atol=1e-9)
    theirs = W.to_torch(grads, block)
    for key, parameter in module.named_parameters():
        gradient = pa.to_backend(theirs[key], "torch")
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-9)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    torch.testing.assert_close(block(X, causal=True), module(X, src_mask=mask).detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ENCODER_LAYERS)
def test_back_into_an_encoder_layer(backend: str, name: str) -> None:
    module = encoder_layer(**ENCODER_LAYERS[name])
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    interop.copy_to(interop.from_module(module, backend=backend), other)
    assert list(other.state_dict()) == list(module.state_dict())
    for key, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


def test_a_whole_encoder_by_its_state_dict(backend: str) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    encoder = moved(torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(8), enable_nested_tensor=False))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False).double(), encoder)
    where = {"dtype": "float64", "backend": backend}
    layers = {
        "0": pa.Projection(8, 8, False, **where),
        **{f"1.layers.{i}": pa.TransformerBlock(8, 2, 12, activation="relu", **where) for i in range(2)},
        "1.norm": pa.LayerNorm(8, **where),
    }
    W.load(layers, W.from_torch(model.state_dict(), layers))
    y = X
    for each in layers.values():
        y = each(y)
    torch.testing.assert_close(y, model(X).detach(), rtol=1e-10, atol=1e-10)
    back = W.to_torch(W.parameters_of(layers), layers)
    state = {name: pa.to_backend(x, "torch") for name, x in back.items()}
    assert set(state) == set(model.state_dict())
    for key, value in model.state_dict().items():
        assert torch.equal(state[key], value), key


def test_separate_projections(backend: str) -> None:
    """As ``torch.nn.functional.multi_head_attention_forward`` takes them."""
    layer = pa.MultiHeadAttention(8, 2, dtype="float64", backend=backend, seed=3)
    state = {name: pa.to_backend(x, "torch") for name, x in W.to_torch(layer.parameters(), layer, packed=False).items()}
    state["in_proj_bias"] += 0.3
    layer.load_parameters(W.from_torch(state, layer))
    turned = X.transpose(0, 1)  # (n, batch, d_model)
    out, _ = torch.nn.functional.multi_head_attention_forward(
        turned, turned, turned, 8, 2, None, state["in_proj_bias"], None, None, False, 0.0, state["out_proj.weight"],
        state["out_proj.bias"], use_separate_proj_weight=True, need_weights=False,
        **{name: x for name, x in state.items() if name.endswith("proj_weight")},
    )  # fmt: skip
    torch.testing.assert_close(layer(X), out.transpose(0, 1), rtol=1e-10, atol=1e-10)


def test_gradients_flow_through_names_and_places() -> None:
    module, layer = torch.nn.MultiheadAttention(8, 2), pa.MultiHeadAttention(8, 2, backend="torch")
    read = W.from_torch(dict(module.named_parameters()), layer)
    read["k_proj.weight"][2, 3].backward()
    assert module.in_proj_weight.grad.nonzero().tolist() == [[8 + 3, 2]]
    layer.load_parameters(read)
    assert not any(x.requires_grad for x in layer.parameters().values())
    assert torch.equal(layer.parameters()["out_proj.weight"], module.out_proj.weight.detach().T)


def test_bfloat16_is_kept() -> None:
    module = torch.nn.TransformerEncoderLayer(8, 2, 12, dtype=torch.bfloat16)
    block: Any = interop.from_module(module, backend="torch")
    assert block.dtype == "bfloat16"
    back = W.to_torch(block.parameters(), block)
    for key, value in module.state_dict().items():
        assert torch.equal(back[key].view(torch.int16), value.view(torch.int16)), key


def uneven() -> Any:
    module = torch.nn.TransformerEncoderLayer(8, 2)
    module.norm2.eps = 1e-3
    return module


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (uneven(), r"module: expected norms of one eps, got 1e-05 and 0\.001"),
        (
            torch.nn.TransformerEncoderLayer(8, 2, activation=torch.nn.functional.mish),
            "module: expected an activation of relu, gelu, silu, got <function mish",
        ),
    ],
    ids=["eps", "activation"],
)
def test_an_encoder_layer_without_a_counterpart_is_refused(module: Any, told: str) -> None:
    with pytest.raises(pa.ArgumentError, match=told):
        interop.from_module(module)


def test_another_architecture_is_refused() -> None:
    with pytest.raises(pa.ArgumentError, match="module: expected one that is a TransformerBlock, got Linear"):
        interop.copy_to(pa.TransformerBlock(8, 2), torch.nn.Linear(8, 8))
    with pytest.raises(pa.CheckpointError, match="module: expected one like TransformerBlock"):
        interop.copy_to(pa.TransformerBlock(8, 2, 12), torch.nn.TransformerEncoderLayer(8, 2, 12))
    wider = torch.nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.raises(pa.CheckpointError, match=r"up_proj\.weight: expected \(8, 16\) float32, got \(8, 12"):
        interop.copy_to(pa.TransformerBlock(8, 2, 12), wider)
    with pytest.raises(pa.CheckpointError, match=r"misshapen linear1\.weight \(expected \(12, 8\), got \(16, 8\)"):
        W.from_torch(wider.state_dict(), pa.TransformerBlock(8, 2, 12))
