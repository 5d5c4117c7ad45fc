"""polyattn's layers for a model that a configuration of Hugging Face describes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...errors import ArgumentError
from ...functional import LinearScaling, Llama3Scaling, RotaryScaling, YaRNScaling
from ...layers import Embedding, Layer, LayerNorm, Projection, RMSNorm, TransformerBlock

__all__ = ["hugging_face_layers"]

ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}


def hugging_face_layers(
    config: Any, *, head: bool = False, pooler: bool = False, dtype: str = "float32", backend: str | None = None,
    device: str | None = None,
) -> dict[str, Layer]:  # fmt: skip
    """Return the layers of a BERT, a GPT-2 or a Llama by name, for the weights of :func:`from_hugging_face`.

    Parameters
    ----------
    config : dict
        The content of the model's ``config.json``, or a configuration object of transformers.
    head : bool
        Whether to return "head", a projection to the vocabulary. With ``tie_word_embeddings`` there is none, because
        the head equals the embedding: logits are ``x @ words.T``.
    pooler : bool
        Whether to return BERT's "pooler", without its tanh.
    dtype : str
    backend, device : str, optional
        Where the layers are bound.

    Returns
    -------
    dict
        BERT: "blocks.0", "blocks.1", … are applied to norm(words + positions + types). GPT-2: the blocks with
        ``causal=True``, then "final_norm", are applied to words + positions. Llama: the same, to the words alone.

    Raises
    ------
    ArgumentError
        If ``model_type`` is another, or the layers do not support a setting of the configuration; the message names
        it.

    Examples
    --------
    >>> from polyattn.interop.weights import hugging_face_layers
    >>> config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 20, "n_positions": 16}
    >>> list(hugging_face_layers(config))
    ['words', 'positions', 'blocks.0', 'final_norm']
    """
    values: Any = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise ArgumentError(f"config: expected what a config.json holds, got {type(config).__name__}")
    kind = values.get("model_type")
    if kind not in tuple(MODELS):
        raise ArgumentError(f"config: expected a model_type of {', '.join(MODELS)}, got {kind!r}")
    if head and kind == "bert":
        raise ArgumentError("head: expected False for bert, whose head is more than a projection, got True")
    if pooler and kind != "bert":
        raise ArgumentError(f"pooler: expected False for {kind}, which has none, got True")
    where: dict[str, Any] = {"dtype": dtype, "backend": backend, "device": device}
    layers: dict[str, Layer] = MODELS[kind](Config(values), where)
    width = next(layer for layer in layers.values() if isinstance(layer, TransformerBlock)).d_model
    if pooler:
        layers["pooler"] = Projection(width, width, seed=100, **where)
    if head and not values.get("tie_word_embeddings", kind == "gpt2"):
        layers["head"] = Projection(width, values["vocab_size"], False, seed=100, **where)
    return layers


class Config:
    """A configuration's values by name; errors name a value that is missing or not supported."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            raise ArgumentError(f"config: expected {name}, got {', '.join(map(str, self.values))}")
        return self.values[name]

    def get(self, name: str, default: Any) -> Any:
        """Return a value, or the default if it is missing or None."""
        found = self.values.get(name)
        return default if found is None else found

    def expect(self, name: str, value: Any) -> None:
        """Require that a setting is absent or has the only value that the layers support."""
        if self.get(name, value) != value:
            raise ArgumentError(f"config: expected {name}={value!r}, got {self.values[name]!r}")

    def activation(self, name: str, default: str, known: Mapping[str, str]) -> str:
        """Return polyattn's name of an activation."""
        theirs = self.get(name, default)
        if theirs not in tuple(known):
            raise ArgumentError(f"config: expected {name} to be one of {', '.join(known)}, got {theirs!r}")
        return known[theirs]


def _bert(config: Config, where: dict[str, Any]) -> dict[str, Layer]:
    config.expect("position_embedding_type", "absolute")
    config.expect("add_cross_attention", False)
    width, eps = config["hidden_size"], config.get("layer_norm_eps", 1e-12)
    activation = config.activation("hidden_act", "gelu", ACTIVATIONS)
    options = {"norm_first": False, "eps": eps, "activation": activation, **where}
    heads, hidden = config["num_attention_heads"], config["intermediate_size"]
    return {
        "words": Embedding(config["vocab_size"], width, seed=101, **where),
        "positions": Embedding(config["max_position_embeddings"], width, seed=102, **where),
        "types": Embedding(config["type_vocab_size"], width, seed=103, **where),
        "embedding_norm": LayerNorm(width, eps=eps, **where),
        **{
            f"blocks.{i}": TransformerBlock(width, heads, hidden, seed=i, **options)
            for i in range(config["num_hidden_layers"])
        },
    }


def _gpt2(config: Config, where: dict[str, Any]) -> dict[str, Layer]:
    config.expect("add_cross_attention", False)
    width, heads, eps = config["n_embd"], config["n_head"], config.get("layer_norm_epsilon", 1e-5)
    activation = config.activation("activation_function", "gelu_new", ACTIVATIONS)
    scale = 1 / math.sqrt(width // heads) if config.get("scale_attn_weights", True) else 1.0
    falling = config.get("scale_attn_by_inverse_layer_idx", False)
    options = {"eps": eps, "activation": activation, **where}
    hidden, count = config.get("n_inner", 4 * width), config["n_layer"]
    return {
        "words": Embedding(config["vocab_size"], width, seed=101, **where),
        "positions": Embedding(config["n_positions"], width, seed=102, **where),
        **{
            f"blocks.{i}": TransformerBlock(
                width, heads, hidden, scale=scale / (i + 1 if falling else 1), seed=i, **options
            )
            for i in range(count)
        },
        "final_norm": LayerNorm(width, eps=eps, **where),
    }


def _llama(config: Config, where: dict[str, Any]) -> dict[str, Layer]:
    width, heads, eps = config["hidden_size"], config["num_attention_heads"], config.get("rms_norm_eps", 1e-6)
    bias = config.get("attention_bias", False)
    if config.get("mlp_bias", False) != bias:  # a block has biases everywhere, or nowhere
        raise ArgumentError(f"config: expected mlp_bias to be attention_bias={bias}, got {not bias}")
    options = {
        "norm": "rms", "eps": eps, "activation": config.activation("hidden_act", "silu", GATED), "bias": bias,
        "num_kv_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", width // heads), "rotary": _rotary(config), **where,
    }  # fmt: skip
    return {
        "words": Embedding(config["vocab_size"], width, seed=101, **where),
        **{
            f"blocks.{i}": TransformerBlock(width, heads, config["intermediate_size"], seed=i, **options)
            for i in range(config["num_hidden_layers"])
        },
        "final_norm": RMSNorm(width, eps=eps, **where),
    }


MODELS: dict[str, Any] = {"bert": _bert, "gpt2": _gpt2, "llama": _llama}


def _rotary(config: Config) -> dict[str, Any]:
    """Return the settings of the rotary embedding; before transformers 5 configurations have two entries for them."""
    old = {"rope_theta": config.get("rope_theta", 10000.0), **config.get("rope_scaling", {})}
    rope = Config(config.get("rope_parameters", old))
    rope.expect("partial_rotary_factor", 1.0)
    length = rope.get("original_max_position_embeddings", config.get("max_position_embeddings", 2048))
    return {"base": float(rope.get("rope_theta", 10000.0)), "scaling": _scaling(rope, length)}


def _scaling(rope: Config, length: int) -> RotaryScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(rope["factor"])
    if kind == "llama3":
        return Llama3Scaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], length)
    if kind == "yarn":
        rope.expect("mscale", None)
        return YaRNScaling(
            rope["factor"], length, rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0),
            rope.get("attention_factor", None), rope.get("truncate", True),
        )  # fmt: skip
    raise ArgumentError(f"config: expected rope_type to be one of default, linear, llama3, yarn, got {kind!r}")
