"""polyattn.interop.weights for BERT, GPT-2 and Llama, by names and formulas; the models themselves in tests/interop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.interop import weights as W
from polyattn.testing import references as ref

Arrays = dict[str, Any]
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12,
        "num_hidden_layers": 2, "vocab_size": 11, "max_position_embeddings": 6, "type_vocab_size": 2,
    },
    "gpt2": {
        "model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "n_inner": 12, "vocab_size": 11, "n_positions": 6,
        "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 11, "rms_norm_eps": 1e-3,
    },
}  # fmt: skip
EMBEDDED, NORM = (11, 8), (8,)
NAMES: dict[str, dict[str, tuple[int, ...]]] = {
    "bert": {
        "embeddings.word_embeddings.weight": EMBEDDED, "embeddings.position_embeddings.weight": (6, 8),
        "embeddings.token_type_embeddings.weight": (2, 8), "embeddings.LayerNorm.weight": NORM,
        "embeddings.LayerNorm.bias": NORM, "pooler.dense.weight": (8, 8), "pooler.dense.bias": NORM,
        **{
            f"encoder.layer.{i}.{name}": shape
            for i in range(2)
            for name, shape in {
                **{f"attention.self.{x}.weight": (8, 8) for x in ("query", "key", "value")},
                **{f"attention.self.{x}.bias": NORM for x in ("query", "key", "value")},
                "attention.output.dense.weight": (8, 8), "attention.output.dense.bias": NORM,
                "attention.output.LayerNorm.weight": NORM, "attention.output.LayerNorm.bias": NORM,
                "intermediate.dense.weight": (12, 8), "intermediate.dense.bias": (12,),
                "output.dense.weight": (8, 12), "output.dense.bias": NORM,
                "output.LayerNorm.weight": NORM, "output.LayerNorm.bias": NORM,
            }.items()
        },
    },
    "gpt2": {
        "wte.weight": EMBEDDED, "wpe.weight": (6, 8), "ln_f.weight": NORM, "ln_f.bias": NORM,
        "lm_head.weight": EMBEDDED,
        **{
            f"h.{i}.{name}": shape
            for i in range(2)
            for name, shape in {
                "ln_1.weight": NORM, "ln_1.bias": NORM, "attn.c_attn.weight": (8, 24), "attn.c_attn.bias": (24,),
                "attn.c_proj.weight": (8, 8), "attn.c_proj.bias": NORM, "ln_2.weight": NORM, "ln_2.bias": NORM,
                "mlp.c_fc.weight": (8, 12), "mlp.c_fc.bias": (12,), "mlp.c_proj.weight": (12, 8),
                "mlp.c_proj.bias": NORM,
            }.items()
        },
    },
    "llama": {
        "embed_tokens.weight": EMBEDDED, "norm.weight": NORM, "lm_head.weight": EMBEDDED,
        **{
            f"layers.{i}.{name}.weight": shape
            for i in range(2)
            for name, shape in {
                "input_layernorm": NORM, "self_attn.q_proj": (24, 8), "self_attn.k_proj": (12, 8),
                "self_attn.v_proj": (12, 8), "self_attn.o_proj": (8, 24), "post_attention_layernorm": NORM,
                "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
            }.items()
        },
    },
}  # fmt: skip
PREFIXES = {"bert": "bert.", "gpt2": "transformer.", "llama": "model."}
IDS = np.array([[1, 4, 10, 0], [7, 7, 2, 3]])


def layers_of(kind: str, **others: Any) -> Any:
    last = {"pooler": True} if kind == "bert" else {"head": True}
    return W.hugging_face_layers({**CONFIGS[kind], **others}, dtype="float64", **last)


def drawn(kind: str, prefix: str = "", seed: int = 3) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        name if name == "lm_head.weight" else prefix + name: rng.standard_normal(shape) / 2
        for name, shape in NAMES[kind].items()
    }


# ---- names, shapes, values -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back_no_bit_changes(kind: str, prefixed: bool) -> None:
    layers, prefix = layers_of(kind), PREFIXES[kind] if prefixed else ""
    theirs = drawn(kind, prefix)
    ours = W.from_hugging_face(theirs, layers, kind)
    W.load(layers, ours)
    back = W.to_hugging_face(W.parameters_of(layers), layers, kind, prefix=prefix)
    assert set(back) == set(theirs)
    for name, x in theirs.items():
        assert back[name].tobytes() == x.tobytes(), name
        assert back[name].flags.c_contiguous
    again = W.from_hugging_face(back, layers, kind, prefix=prefix)
    assert {name: x.tobytes() for name, x in again.items()} == {name: x.tobytes() for name, x in ours.items()}


def heads(x: Any, count: int) -> Any:
    return np.swapaxes(x.reshape(*x.shape[:-1], count, -1), -3, -2)


def joined(x: Any) -> Any:
    x = np.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], -1)


def bert(p: Arrays) -> Any:
    def linear(x: Any, name: str) -> Any:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        return ref.layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"], 1e-12)

    e = "embeddings."
    places = p[f"{e}position_embeddings.weight"][: IDS.shape[1]] + p[f"{e}token_type_embeddings.weight"][0]
    x = norm(p[f"{e}word_embeddings.weight"][IDS] + places, f"{e}LayerNorm")
    for i in range(2):
        b = f"encoder.layer.{i}."
        q, k, v = (heads(linear(x, f"{b}attention.self.{name}"), 2) for name in ("query", "key", "value"))
        a = linear(joined(ref.attention(q, k, v).out), f"{b}attention.output.dense")
        x = norm(x + a, f"{b}attention.output.LayerNorm")
        inner = ref.gelu(linear(x, f"{b}intermediate.dense"))
        x = norm(x + linear(inner, f"{b}output.dense"), f"{b}output.LayerNorm")
    return x


def gpt2(p: Arrays) -> Any:
    def conv1d(x: Any, name: str) -> Any:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        return ref.layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    x = p["wte.weight"][IDS] + p["wpe.weight"][: IDS.shape[1]]
    for i in range(2):
        b = f"h.{i}."
        q, k, v = (heads(h, 2) for h in np.split(conv1d(norm(x, f"{b}ln_1"), f"{b}attn.c_attn"), 3, axis=-1))
        a = ref.attention(q, k, v, causal=True, scale=0.5 / (i + 1)).out
        x = x + conv1d(joined(a), f"{b}attn.c_proj")
        x = x + conv1d(ref.gelu(conv1d(norm(x, f"{b}ln_2"), f"{b}mlp.c_fc"), "tanh"), f"{b}mlp.c_proj")
    return norm(x, "ln_f")


def llama(p: Arrays) -> Any:
    def linear(x: Any, name: str) -> Any:
        return x @ p[f"{name}.weight"].T

    def norm(x: Any, name: str) -> Any:
        return p[f"{name}.weight"] * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-3)

    angles = np.arange(IDS.shape[1])[:, None] * 10000.0 ** (-np.arange(3) / 3)  # (n, head_dim / 2)

    def turned(x: Any) -> Any:
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = p["embed_tokens.weight"][IDS]
    for i in range(2):
        b = f"layers.{i}."
        h = norm(x, f"{b}input_layernorm")
        q = turned(heads(linear(h, f"{b}self_attn.q_proj"), 4))
        k = turned(heads(linear(h, f"{b}self_attn.k_proj"), 2))
        v = heads(linear(h, f"{b}self_attn.v_proj"), 2)
        k, v = (np.repeat(y, 2, axis=-3) for y in (k, v))
        x = x + linear(joined(ref.attention(q, k, v, causal=True).out), f"{b}self_attn.o_proj")
        h = norm(x, f"{b}post_attention_layernorm")
        gate, up = (linear(h, f"{b}mlp.{name}_proj") for name in ("gate", "up"))
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{b}mlp.down_proj")
    return norm(x, "norm")


FORMULAS: dict[str, Any] = {"bert": bert, "gpt2": gpt2, "llama": llama}


def run(layers: Any) -> Any:
    """Compute the hidden states as ``hugging_face_layers`` documents."""
    causal = {} if "types" in layers else {"causal": True}
    x = layers["words"](IDS)
    if "positions" in layers:
        x = x + layers["positions"](np.arange(IDS.shape[1]))
    if "types" in layers:
        x = layers["embedding_norm"](x + layers["types"](np.zeros(IDS.shape[1], dtype=np.int64)))
    for name, layer in layers.items():
        x = layer(x, **causal) if name.startswith("blocks.") else x
    return layers["final_norm"](x) if "final_norm" in layers else x


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_layers_compute_what_the_model_does(kind: str) -> None:
    layers, theirs = layers_of(kind), drawn(kind)
    W.load(layers, W.from_hugging_face(theirs, layers, kind))
    want = FORMULAS[kind](theirs)
    np.testing.assert_allclose(run(layers), want, rtol=1e-9, atol=1e-9)
    last, name = ("pooler", "pooler.dense") if kind == "bert" else ("head", "lm_head")
    bias = theirs.get(f"{name}.bias", 0.0)
    np.testing.assert_allclose(layers[last](want), want @ theirs[f"{name}.weight"].T + bias, rtol=1e-12, atol=1e-12)


# ---- what files hold besides -----------------------------------------------------------------------------------------


def test_old_names_and_buffers_and_what_is_not_wanted() -> None:
    layers, theirs = layers_of("bert"), drawn("bert", "bert.")
    plain = W.from_hugging_face(theirs, layers, "bert")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in theirs.items()
    }
    old |= {"bert.embeddings.position_ids": np.arange(6), "cls.predictions.bias": np.zeros(11)}
    with pytest.raises(pa.CheckpointError, match=r"but unexpected cls\.predictions\.bias$"):
        W.from_hugging_face(old, layers, "bert")
    for name, x in W.from_hugging_face(old, layers, "bert", leave_out=["cls."]).items():
        np.testing.assert_array_equal(x, plain[name])
    del layers["pooler"]
    left = W.from_hugging_face(old, layers, "bert", leave_out=["cls.", "bert.pooler."])
    assert set(plain) - set(left) == {"pooler.weight", "pooler.bias"}
    masks = {f"h.{i}.attn.{name}": np.ones((1, 1, 6, 6)) for i in range(2) for name in ("bias", "masked_bias")}
    W.from_hugging_face({**drawn("gpt2"), **masks}, layers_of("gpt2"), "gpt2")
    W.from_hugging_face({**drawn("llama"), "layers.0.self_attn.rotary_emb.inv_freq": 1}, layers_of("llama"), "llama")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tied_head(kind: str) -> None:
    layers, prefix = layers_of(kind, tie_word_embeddings=True), PREFIXES[kind]
    assert "head" not in layers
    words = prefix + next(iter(NAMES[kind]))
    theirs = drawn(kind, prefix)
    with pytest.raises(pa.CheckpointError, match=r"but unexpected lm_head\.weight$"):
        W.from_hugging_face(theirs, layers, kind)  # it is another matrix
    theirs["lm_head.weight"] = theirs[words].copy()
    ours = W.from_hugging_face(theirs, layers, kind)
    back = W.to_hugging_face(ours, layers, kind, prefix=prefix, tied_head=True)
    assert {name: x.tobytes() for name, x in back.items()} == {name: x.tobytes() for name, x in theirs.items()}
    without = W.to_hugging_face(ours, layers, kind, prefix=prefix)
    assert set(theirs) - set(without) == {"lm_head.weight"}
    assert {name: x.tobytes() for name, x in W.from_hugging_face(without, layers, kind).items()} == {
        name: x.tobytes() for name, x in ours.items()
    }
    with pytest.raises(pa.ArgumentError, match="tied_head: expected 'words' and no 'head' among the layers"):
        W.to_hugging_face({}, {}, kind, tied_head=True)


# ---- what does not fit ---------------------------------------------------------------------------------------------


def test_weights_of_another_architecture_are_told() -> None:
    with pytest.raises(pa.CheckpointError) as told:
        W.from_hugging_face(drawn("gpt2"), layers_of("bert"), "bert")
    text = str(told.value)
    assert text.startswith("tensors: expected the names and shapes that bert has for these layers, but missing ")
    assert "missing embeddings.word_embeddings.weight, " in text
    assert "; unexpected h.0.attn.c_attn.bias, " in text
    assert " and 31 more; unexpected" in text
    assert text.endswith(" and 21 more")
    wider = W.hugging_face_layers({**CONFIGS["llama"], "hidden_size": 16, "num_hidden_layers": 3}, dtype="float64")
    with pytest.raises(pa.CheckpointError) as told:
        W.from_hugging_face(drawn("llama"), wider, "llama")
    for part in (
        "missing layers.2.input_layernorm.weight, ",
        "; unexpected lm_head.weight; ",
        "misshapen embed_tokens.weight (expected (11, 16), got (11, 8)), layers.0.input_layernorm.weight (expected ",
    ):
        assert part in str(told.value)


def test_other_arguments_are_told() -> None:
    layers, theirs = layers_of("gpt2"), drawn("gpt2")
    with pytest.raises(pa.ArgumentError, match="architecture: expected one of bert, gpt2, llama, got 't5'"):
        W.from_hugging_face(theirs, layers, "t5")
    with pytest.raises(pa.ArgumentError, match=r"expected some of gpt2's words, .*, head, got 'norm': LayerNorm"):
        W.from_hugging_face(theirs, {"norm": pa.LayerNorm(8)}, "gpt2")
    with pytest.raises(pa.ArgumentError, match=r"some of bert's .*, blocks\.N, got 'head': Projection"):
        W.from_hugging_face(theirs, {"head": pa.Projection(8, 11)}, "bert")
    with pytest.raises(pa.ArgumentError, match=r"what gpt2 has as well, got a TransformerBlock with attention\.k_norm"):
        W.from_hugging_face(theirs, {"blocks.0": pa.TransformerBlock(8, 2, qk_norm="rms")}, "gpt2")
    with pytest.raises(pa.CheckpointError, match="tensors: expected a dict of arrays by name, got list"):
        W.from_hugging_face([theirs], layers, "gpt2")  # type: ignore[arg-type]
