"""polyattn.interop.weights.hugging_face_layers: the settings of a configuration, and those that are not supported."""

from __future__ import annotations

from typing import Any

import pytest

import polyattn as pa
from polyattn.functional import LinearScaling, Llama3Scaling, YaRNScaling
from polyattn.interop import weights as W

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {
        "model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12,
        "num_hidden_layers": 2, "vocab_size": 11, "max_position_embeddings": 6, "type_vocab_size": 2,
    },
    "gpt2": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11, "n_positions": 6},
    "llama": {
        "model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 12, "num_hidden_layers": 2, "vocab_size": 11,
    },
}  # fmt: skip


def layers_of(kind: str, **others: Any) -> Any:
    return W.hugging_face_layers({**CONFIGS[kind], **others}, dtype="float64")


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, None),
        ({"rope_theta": 500.0}, None),
        ({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}, LinearScaling(2.0)),
        (
            {"rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            }},
            Llama3Scaling(8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_parameters": {
                "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64,
            }},
            YaRNScaling(4.0, 64),
        ),
    ],
    ids=["default", "old", "linear", "llama3", "yarn"],
)  # fmt: skip
def test_the_rotary_embedding_of_a_configuration(rope: Any, scaling: Any) -> None:
    block: Any = W.hugging_face_layers({**CONFIGS["llama"], **rope})["blocks.1"]
    assert block.config()["rotary"] == {"base": 500.0, "dim": None, "interleaved": False, "scaling": scaling}


def test_a_configuration_decides() -> None:
    bert = layers_of("bert", hidden_act="relu", layer_norm_eps=1e-3)
    like = pa.TransformerBlock(8, 2, 12, norm_first=False, eps=1e-3, activation="relu")
    assert bert["blocks.0"].config() == like.config()
    assert bert["blocks.0"].dtype == bert["words"].dtype == "float64"
    falling = layers_of("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert [falling[f"blocks.{i}"].config()["scale"] for i in (0, 1)] == [0.5, 0.25]
    assert layers_of("gpt2", scale_attn_weights=False)["blocks.1"].config()["scale"] == 1.0
    assert layers_of("gpt2")["blocks.1"].config()["hidden"] == 32
    llama = layers_of("llama", attention_bias=True, mlp_bias=True, hidden_act="gelu", num_key_value_heads=None)
    config = llama["blocks.1"].config()
    assert (config["bias"], config["activation"], config["num_kv_heads"]) == (True, "geglu", 4)
    starts = [W.hugging_face_layers(CONFIGS["llama"])[f"blocks.{i}"].parameters() for i in (0, 1)]
    assert (starts[0]["attention.q_proj.weight"] != starts[1]["attention.q_proj.weight"]).all()


@pytest.mark.parametrize(
    ("kind", "others", "told"),
    [
        ("bert", {"model_type": "t5"}, "config: expected a model_type of bert, gpt2, llama, got 't5'"),
        ("bert", {"position_embedding_type": "relative_key"}, "expected position_embedding_type='absolute', got 'rel"),
        ("bert", {"hidden_act": "mish"}, "config: expected hidden_act to be one of gelu, gelu_new, .*, got 'mish'"),
        ("gpt2", {"add_cross_attention": True}, "config: expected add_cross_attention=False, got True"),
        ("llama", {"attention_bias": True}, "config: expected mlp_bias to be attention_bias=True, got False"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type to be one of default, .* 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "config: expected factor, got rope_theta, type"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor=1\.0, got 0\.5"),
    ],
)  # fmt: skip
def test_what_a_configuration_asks_in_vain_is_told(kind: str, others: Any, told: str) -> None:
    with pytest.raises(pa.ArgumentError, match=told):
        W.hugging_face_layers({**CONFIGS[kind], **others})


def test_no_configuration_is_told() -> None:
    with pytest.raises(pa.ArgumentError, match=r"config: expected what a config\.json holds, got str"):
        W.hugging_face_layers("config.json")
    with pytest.raises(pa.ArgumentError, match="config: expected hidden_size, got model_type"):
        W.hugging_face_layers({"model_type": "bert"})
    with pytest.raises(pa.ArgumentError, match=r"head: expected False for bert, .*, got True"):
        W.hugging_face_layers(CONFIGS["bert"], head=True)
    with pytest.raises(pa.ArgumentError, match="pooler: expected False for llama, which has none, got True"):
        W.hugging_face_layers(CONFIGS["llama"], pooler=True)
