"""Weights to and from Keras, Flax and Hugging Face's models: the same outputs as theirs, and exactly the same weights.

``nox -s interop`` runs it: none of them is part of the environments of the other sessions.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.checkpoint import read_tensors
from polyattn.interop import weights as W

os.environ.setdefault("KERAS_BACKEND", "torch")
INSTALLS = "nox -s interop, which installs it"
Arrays = dict[str, Any]
RNG = np.random.default_rng(8)
X = RNG.standard_normal((2, 5, 8)).astype(np.float32)
CONTEXT = RNG.standard_normal((2, 7, 8)).astype(np.float32)


def drawn_like(arrays: Arrays, seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(x.shape).astype(np.float32) for name, x in arrays.items()}


def same(got: Arrays, want: Arrays) -> None:
    assert list(got) == list(want)
    for name, x in want.items():
        assert np.asarray(got[name]).tobytes() == np.asarray(x).tobytes(), name


# ---- Keras -----------------------------------------------------------------------------------------------------------


KERAS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("MultiHeadAttention", {"num_heads": 2, "key_dim": 4}, {"num_heads": 2}),
    "wide": (
        "MultiHeadAttention",
        {"num_heads": 2, "key_dim": 3, "value_dim": 5, "use_bias": False},
        {"num_heads": 2, "head_dim": 3, "value_dim": 5, "bias": False},
    ),
    "grouped": (
        "GroupQueryAttention",
        {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 3},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3},
    ),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras with torch
@pytest.mark.parametrize("name", KERAS)
def test_keras(name: str) -> None:
    keras = pytest.importorskip("keras", reason=INSTALLS)
    kind, theirs, ours = KERAS[name]
    module, layer = getattr(keras.layers, kind)(**theirs), pa.MultiHeadAttention(8, **ours)
    module(X, CONTEXT)  # which makes the variables

    def variables() -> Arrays:
        prefix = f"{module.path}/"
        return {v.path.removeprefix(prefix): keras.ops.convert_to_numpy(v.value) for v in module.weights}

    drawn = drawn_like(variables())
    module.set_weights(list(drawn.values()))
    layer.load_parameters(W.from_keras(variables(), layer))
    want = keras.ops.convert_to_numpy(module(X, CONTEXT))
    np.testing.assert_allclose(layer(X, CONTEXT), want, rtol=1e-5, atol=1e-5)
    want = keras.ops.convert_to_numpy(module(X, X, use_causal_mask=True))
    np.testing.assert_allclose(layer(X, causal=True), want, rtol=1e-5, atol=1e-5)
    back = W.to_keras(layer.parameters(), layer)
    same(back, drawn)
    module.set_weights([np.zeros_like(x) for x in drawn.values()])
    module.set_weights(list(back.values()))
    same(variables(), drawn)


# ---- Flax ------------------------------------------------------------------------------------------------------------


FLAX: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "bare": ({"use_bias": False, "qkv_features": 12}, {"bias": False, "head_dim": 6}),
    "grouped": ({"num_heads": 4, "num_kv_heads": 2}, {"num_heads": 4, "num_kv_heads": 2}),
    "normed": ({"normalize_qk": True}, {"qk_norm": "layer"}),
}


@pytest.mark.parametrize("name", FLAX)
def test_flax(name: str) -> None:
    nnx = pytest.importorskip("flax.nnx", reason=INSTALLS)
    theirs, ours = FLAX[name]
    module = nnx.MultiHeadAttention(**{"num_heads": 2, **theirs}, in_features=8, decode=False, rngs=nnx.Rngs(0))
    layer = pa.MultiHeadAttention(8, **{"num_heads": 2, **ours})

    def values() -> Arrays:
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))

    def fill(nested: Arrays) -> None:
        state = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(state, nested)
        nnx.update(module, state)

    fill(drawn_nested(values()))
    start = values()
    layer.load_parameters(W.from_flax(start, layer))
    np.testing.assert_allclose(layer(X, CONTEXT), module(X, CONTEXT), rtol=1e-5, atol=1e-5)
    back = W.to_flax(layer.parameters(), layer)
    fill({key: {k: np.zeros_like(x) for k, x in inner.items()} for key, inner in start.items()})
    fill(back)
    for key, inner in start.items():
        same({k: values()[key][k] for k in inner}, inner)


def drawn_nested(nested: Arrays) -> Arrays:
    return {key: drawn_like(inner, seed=len(key)) for key, inner in nested.items()}


def test_flax_linen() -> None:
    jax, linen = pytest.importorskip("jax"), pytest.importorskip("flax.linen", reason=INSTALLS)
    module, layer = linen.MultiHeadDotProductAttention(num_heads=2), pa.MultiHeadAttention(8, 2)
    params = drawn_nested(module.init(jax.random.key(0), X, CONTEXT)["params"])
    layer.load_parameters(W.from_flax(params, layer))
    want = module.apply({"params": params}, X, CONTEXT)
    np.testing.assert_allclose(layer(X, CONTEXT), want, rtol=1e-5, atol=1e-5)
    for key, inner in W.to_flax(layer.parameters(), layer).items():
        assert {k: x.tobytes() for k, x in inner.items()} == {k: x.tobytes() for k, x in params[key].items()}


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "hidden_size": 32}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 37, "max_position_embeddings": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, "factor": 4.0, **more}}


SHORT = {"original_max_position_embeddings": 16}
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertModel", "BertConfig", {**SIZES, "intermediate_size": 37}),
    "bert-masked": ("bert", "BertForMaskedLM", "BertConfig", {**SIZES, "intermediate_size": 37, "hidden_act": "relu"}),
    "gpt2": ("gpt2", "GPT2Model", "GPT2Config", GPT2),
    "gpt2-tied": ("gpt2", "GPT2LMHeadModel", "GPT2Config", {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-untied": ("gpt2", "GPT2LMHeadModel", "GPT2Config", {
        **GPT2, "tie_word_embeddings": False, "scale_attn_weights": False, "n_inner": 40,
    }),
    "llama": ("llama", "LlamaModel", "LlamaConfig", {**GROUPED, "head_dim": 6}),
    "llama-head": ("llama", "LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama-tied": ("llama", "LlamaForCausalLM", "LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "llama-biases": ("llama", "LlamaModel", "LlamaConfig", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", "LlamaModel", "LlamaConfig", {**GROUPED, **rope("linear")}),
    "llama-3": ("llama", "LlamaModel", "LlamaConfig", {
        **GROUPED, **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **SHORT),
    }),
    "llama-yarn": ("llama", "LlamaModel", "LlamaConfig", {**GROUPED, **rope("yarn", **SHORT)}),
}  # fmt: skip
PREFIXES = {"bert": "bert.", "gpt2": "transformer.", "llama": "model."}
IDS = np.random.default_rng(0).integers(3, 50, (3, 20))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """Return a model with random weights, those of norms and biases too, polyattn's layers for it, and its type."""
    torch = pytest.importorskip("torch", reason=INSTALLS)
    transformers = pytest.importorskip("transformers", reason=INSTALLS)
    kind, name, config, options = MODELS[request.param]
    torch.manual_seed(5)
    made = getattr(transformers, name)(getattr(transformers, config)(**options, **SPECIAL, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    headed = name.endswith(("LMHeadModel", "ForCausalLM"))
    layers = W.hugging_face_layers(made.config, head=headed, pooler=name == "BertModel")
    return made.eval(), layers, kind, name


def state_of(model: Any) -> Arrays:
    return {name: x.numpy().copy() for name, x in model.state_dict().items()}


def hidden(layers: Any, ids: Any, **arguments: Any) -> Any:
    """Compute the hidden states as ``hugging_face_layers`` documents."""
    x = layers["words"](ids)
    if "positions" in layers:
        x = x + layers["positions"](np.arange(ids.shape[1]))
    if "types" in layers:
        x = layers["embedding_norm"](x + layers["types"](np.zeros(ids.shape[1], dtype=np.int64)))
    for name, layer in layers.items():
        x = layer(x, **arguments) if name.startswith("blocks.") else x
    return layers["final_norm"](x) if "final_norm" in layers else x


def test_hugging_face(model: Any) -> None:
    import torch

    module, layers, kind, name = model
    state = state_of(module)
    W.load(layers, W.from_hugging_face(state, layers, kind, leave_out=["cls."]))
    lengths = np.asarray([20, 13, 6]) if kind == "bert" else None
    there = None if lengths is None else torch.arange(20) < torch.from_numpy(lengths)[:, None]
    with torch.no_grad():
        told = module(torch.from_numpy(IDS), attention_mask=there, output_hidden_states=True)
    x = hidden(layers, IDS, **({"key_lengths": lengths} if kind == "bert" else {"causal": True}))
    kept = np.ones((3, 20), dtype=bool) if there is None else there.numpy()  # the rest was filled up
    np.testing.assert_allclose(x[kept], told.hidden_states[-1].numpy()[kept], rtol=1e-5, atol=1e-5)
    if "pooler" in layers:
        np.testing.assert_allclose(np.tanh(layers["pooler"](x[:, 0])), told.pooler_output, rtol=1e-5, atol=1e-5)
    if name.endswith(("LMHeadModel", "ForCausalLM")):
        logits = layers["head"](x) if "head" in layers else x @ layers["words"].parameters()["weight"].T
        np.testing.assert_allclose(logits, told.logits, rtol=1e-5, atol=3e-5)


def test_hugging_face_and_back(model: Any) -> None:
    """A state dict has the same names and bits, and a model that loads it the same output."""
    import torch

    module, layers, kind, name = model
    state = state_of(module)
    ours = W.from_hugging_face(state, layers, kind, leave_out=["cls."])
    tied = "lm_head.weight" in state and "head" not in layers
    prefix = "" if name.endswith(("BertModel", "GPT2Model", "LlamaModel")) else PREFIXES[kind]
    back = W.to_hugging_face(ours, layers, kind, prefix=prefix, tied_head=tied)
    back = {key: back[key] for key in state if key in back}
    same(back, {key: x for key, x in state.items() if not key.startswith("cls.")})
    with torch.no_grad():
        want = module(torch.from_numpy(IDS))[0]
        for key, parameter in module.named_parameters():
            if not key.startswith("cls."):
                parameter.zero_()
        module.load_state_dict({key: torch.from_numpy(x.copy()) for key, x in back.items()}, strict=kind != "bert")
        assert torch.equal(module(torch.from_numpy(IDS))[0], want)
    same(W.from_hugging_face(back, layers, kind), ours)


def test_from_the_files_of_a_model(model: Any, tmp_path: Path) -> None:
    """As ``save_pretrained`` writes them: tied weights once, and the configuration beside them."""
    module, layers, kind, _ = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how transformers writes files
        module.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    made = W.hugging_face_layers(config, head="head" in layers, pooler="pooler" in layers)
    assert {key: layer.config() for key, layer in made.items()} == {key: x.config() for key, x in layers.items()}
    tensors, _ = read_tensors(tmp_path / "model.safetensors")
    state = state_of(module)
    same(
        W.from_hugging_face(tensors, layers, kind, leave_out=["cls."]),
        W.from_hugging_face(state, layers, kind, leave_out=["cls."]),
    )
