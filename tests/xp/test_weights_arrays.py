"""Weights as arrays of the library under test: converted exactly, without leaving it; and GPT-2's activation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry
from polyattn.interop import weights as W
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

RNG = np.random.default_rng(71)
X, DY = RNG.standard_normal((2, 3, 8)), RNG.standard_normal((2, 3, 8))
ATTENTION = pa.MultiHeadAttention(8, 2)
LAYERS = {"words": pa.Embedding(5, 8), "blocks.0": pa.TransformerBlock(8, 2, 12), "final_norm": pa.LayerNorm(8)}
WAYS: dict[str, Any] = {
    "torch": (W.to_torch, W.from_torch, ATTENTION),
    "keras": (W.to_keras, W.from_keras, ATTENTION),
    "flax": (W.to_flax, W.from_flax, ATTENTION),
    "gpt2": (
        lambda parameters, layers: W.to_hugging_face(parameters, layers, "gpt2", tied_head=True),
        lambda tensors, layers: W.from_hugging_face(tensors, layers, "gpt2"),
        LAYERS,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_arrays_stay_in_their_library(contract: Any, backend: Any, make: Any, to_np: Any, way: str) -> None:
    to, of, layers = WAYS[way]
    hosts = {name: RNG.standard_normal(x.shape).astype(np.float32) for name, x in W.parameters_of(layers).items()}
    theirs = to({name: make(x, "float32") for name, x in hosts.items()}, layers)
    for name, x in of(theirs, layers).items():
        assert registry.owner(x) is contract
        assert to_np(x).tobytes() == hosts[name].tobytes(), name
    there = layers.to(backend) if isinstance(layers, pa.layers.Layer) else {k: v.to(backend) for k, v in layers.items()}
    W.load(there, of(theirs, layers))
    for name, x in W.parameters_of(there).items():
        assert to_np(x).tobytes() == hosts[name].tobytes(), name


def test_the_gelu_of_gpt2(contract: Any, backend: Any, target: Any, make: Any, to_np: Any) -> None:
    layer = pa.FeedForward(8, 12, activation="gelu_tanh", dtype="float64", backend=backend, device=target.device)
    p = {name: to_np(x) + 0.3 * RNG.standard_normal(x.shape) for name, x in layer.parameters().items()}
    layer = layer.with_parameters({name: make(x) for name, x in p.items()})
    y, cache = layer.forward(make(X))
    inputs, grads = layer.backward(make(DY), cache)

    def value(x: Any, *arrays: Any) -> Any:
        up_w, up_b, down_w, down_b = arrays
        return ref.linear(ref.gelu(ref.linear(x, up_w, up_b), "tanh"), down_w, down_b)

    assert list(p) == ["up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"]
    assert_close(to_np(y), value(X, *p.values()))
    exact = pa.FeedForward(8, 12, dtype="float64").with_parameters(p)(X)
    assert np.max(np.abs(to_np(y) - exact)) > 1e-5
    gradients = [to_np(inputs.x), *(to_np(gradient) for gradient in grads.values())]
    slopes_agree(lambda *arrays: float(np.sum(value(*arrays) * DY)), [X, *p.values()], gradients)


def test_a_block_with_the_gelu_of_gpt2(contract: Any, backend: Any, target: Any, make: Any, to_np: Any) -> None:
    """All of the block's ways to its activation: the call, the forward, decoding; the backward is as NumPy's."""
    where = {"dtype": "float64", "backend": backend, "device": target.device}
    block = pa.TransformerBlock(8, 2, 12, activation="gelu_tanh", **where)
    there = block.to("numpy")
    y, cache = block.forward(make(X), causal=True)
    want, want_cache = there.forward(X, causal=True)
    exact = pa.TransformerBlock(8, 2, 12, dtype="float64")
    assert np.max(np.abs(want - exact.with_parameters(there.parameters())(X, causal=True))) > 1e-6
    assert_close(to_np(y), want)
    assert_close(to_np(block(make(X), causal=True)), want)
    (dx, *_), grads = block.backward(make(DY), cache)
    (want_dx, *_), want_grads = there.backward(DY, want_cache)
    assert_close(to_np(dx), want_dx)
    for name, gradient in grads.items():
        scale = 1.0 if name.endswith("k_proj.bias") else None
        assert_close(to_np(gradient), want_grads[name], scale=scale, what=name)
    keys = pa.KVCache.create(2, 2, 4, 4, **where)
    assert_close(to_np(block.decode(make(X), keys)[0]), want)
