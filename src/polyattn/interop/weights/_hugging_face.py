"""Hugging Face's names of BERT, GPT-2 and Llama, as in their files and their models' state dicts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ... import registry
from ...backend import Array
from ...errors import ArgumentError, CheckpointError
from ...layers import Layer, TransformerBlock
from ._entries import Entry, covering, read, write
from ._layers import parts_of, shapes_of

__all__ = ["from_hugging_face", "to_hugging_face"]

HEAD = "lm_head.weight"


class Architecture(NamedTuple):
    """The names of one kind of model."""

    prefix: str
    """Prefix of the inner model's names in a model with a head."""
    parts: dict[str, str]
    """Our layers' names, and theirs."""
    block: str
    """Prefix of the names of a block."""
    of_block: dict[str, tuple[str, ...]]
    """Their parts of a block, and ours; several of ours are concatenated along the last axis."""
    transposed: bool
    """Whether weights within a block are (out, in)."""
    buffers: str
    """A pattern of other names that files may contain: arrays that are computed, not trained."""


QKV = ("attention.q_proj", "attention.k_proj", "attention.v_proj")

ARCHITECTURES = {
    "bert": Architecture(
        prefix="bert.",
        parts={
            "words": "embeddings.word_embeddings",
            "positions": "embeddings.position_embeddings",
            "types": "embeddings.token_type_embeddings",
            "embedding_norm": "embeddings.LayerNorm",
            "pooler": "pooler.dense",
        },
        block="encoder.layer.{}.",
        of_block={
            "attention.self.query": QKV[:1],
            "attention.self.key": QKV[1:2],
            "attention.self.value": QKV[2:],
            "attention.output.dense": ("attention.out_proj",),
            "attention.output.LayerNorm": ("norm1",),
            "intermediate.dense": ("feed_forward.up_proj",),
            "output.dense": ("feed_forward.down_proj",),
            "output.LayerNorm": ("norm2",),
        },
        transposed=True,
        buffers=r"embeddings\.(position|token_type)_ids",
    ),
    "gpt2": Architecture(
        prefix="transformer.",
        parts={"words": "wte", "positions": "wpe", "final_norm": "ln_f"},
        block="h.{}.",
        of_block={
            "ln_1": ("norm1",),
            "attn.c_attn": QKV,
            "attn.c_proj": ("attention.out_proj",),
            "ln_2": ("norm2",),
            "mlp.c_fc": ("feed_forward.up_proj",),
            "mlp.c_proj": ("feed_forward.down_proj",),
        },
        transposed=False,
        buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    ),
    "llama": Architecture(
        prefix="model.",
        parts={"words": "embed_tokens", "final_norm": "norm"},
        block="layers.{}.",
        of_block={
            "input_layernorm": ("norm1",),
            **{f"self_attn.{x}_proj": (f"attention.{x}_proj",) for x in "qkv"},
            "self_attn.o_proj": ("attention.out_proj",),
            "post_attention_layernorm": ("norm2",),
            **{f"mlp.{x}_proj": (f"feed_forward.{x}_proj",) for x in ("gate", "up", "down")},
        },
        transposed=True,
        buffers=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
    ),
}


def from_hugging_face(
    tensors: Mapping[str, Array], layers: Mapping[str, Layer], architecture: str, *, prefix: str | None = None,
    leave_out: Sequence[str] = (),
) -> dict[str, Array]:  # fmt: skip
    """Return the weights of a BERT, a GPT-2 or a Llama under our names and in our shapes.

    Parameters
    ----------
    tensors : dict
        A state dict, or what a model's safetensors files hold; arrays of any library.
    layers : dict of layers by name
        As :func:`hugging_face_layers` makes them: "words" (the embedding), "positions", "types" and
        "embedding_norm" (BERT), "blocks.0", "blocks.1", …, "final_norm" (GPT-2, Llama), and optionally "head"
        (GPT-2, Llama) and "pooler" (BERT).
    architecture : {"bert", "gpt2", "llama"}
    prefix : str, optional
        Prefix of all names but those of the head; by default "bert.", "transformer." or "model." if names begin
        with it.
    leave_out : sequence of str
        Prefixes of names to ignore, ``["cls.", "bert.pooler."]``. Buffers and a head that equals the embedding are
        always ignored.

    Returns
    -------
    dict
        Parameters by ``layer.parameter``, for :func:`load`.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of these layers; the message lists all of them.
    ArgumentError
        If there is no such architecture, or it has no such layer.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> from polyattn.interop.weights import from_hugging_face
    >>> layers = {"words": pa.Embedding(9, 4), "final_norm": pa.RMSNorm(4)}
    >>> tensors = {"model.embed_tokens.weight": np.zeros((9, 4)), "model.norm.weight": np.ones(4)}
    >>> list(from_hugging_face(tensors, layers, "llama"))
    ['words.weight', 'final_norm.weight']
    """
    known = _checked(architecture)
    if not isinstance(tensors, Mapping):
        raise CheckpointError(f"tensors: expected a dict of arrays by name, got {type(tensors).__name__}")
    tensors = {_today(str(name)): x for name, x in tensors.items()}
    if prefix is None:
        prefix = known.prefix if any(name.startswith(known.prefix) for name in tensors) else ""
    entries = _entries(layers, known, architecture, prefix)
    tied = _is_embedding(tensors, {entry.ours: entry.theirs for entry in entries})

    def passed_over(name: str) -> bool:
        buffer = re.fullmatch(known.buffers, name.removeprefix(prefix))
        return name.startswith(tuple(leave_out)) or buffer is not None or (name == HEAD and tied)

    whose = f"that {architecture} has for these layers"
    return read("tensors", tensors, entries, shapes_of(layers), whose, passed_over)


def to_hugging_face(
    parameters: Mapping[str, Array], layers: Mapping[str, Layer], architecture: str, *, prefix: str = "",
    tied_head: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """Return parameters under Hugging Face's names and in its shapes: the reverse of :func:`from_hugging_face`.

    Parameters
    ----------
    parameters : dict
        As :func:`parameters_of` returns them, or trained; arrays of any library. Gradients can be converted likewise.
    layers : dict of layers by name
        As for :func:`from_hugging_face`.
    architecture : {"bert", "gpt2", "llama"}
    prefix : str
        Prefix of all names but that of the head: "bert.", "transformer." or "model." for a model with a head.
    tied_head : bool
        Whether to return the embedding a second time as ``lm_head.weight``, as in state dicts.

    Returns
    -------
    dict
        For ``model.load_state_dict``, once converted to tensors, or for a safetensors file.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of the layers.
    ArgumentError
        As :func:`from_hugging_face`.

    Examples
    --------
    >>> import polyattn as pa
    >>> from polyattn.interop.weights import parameters_of, to_hugging_face
    >>> layers = {"blocks.0": pa.TransformerBlock(4, 2)}
    >>> to_hugging_face(parameters_of(layers), layers, "gpt2")["h.0.attn.c_attn.weight"].shape
    (4, 12)
    """
    entries = _entries(layers, _checked(architecture), architecture, prefix)
    tensors = write(parameters, entries, shapes_of(layers))
    if tied_head:
        if "head" in layers or "words" not in layers:
            raise ArgumentError(f"tied_head: expected 'words' and no 'head' among the layers, got {', '.join(layers)}")
        tensors[HEAD] = tensors[next(entry.theirs for entry in entries if entry.ours == ("words.weight",))]
    return tensors


def _checked(architecture: str) -> Architecture:
    if architecture not in tuple(ARCHITECTURES):
        raise ArgumentError(f"architecture: expected one of {', '.join(ARCHITECTURES)}, got {architecture!r}")
    return ARCHITECTURES[architecture]


def _today(name: str) -> str:
    """Return the current name for a name that old files of BERT use."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _is_embedding(tensors: Mapping[str, Any], theirs: Mapping[tuple[str, ...], str]) -> bool:
    """Say whether the head equals the embedding, as in state dicts, if there is no layer "head"."""
    embedding, head = tensors.get(theirs.get(("words.weight",), "")), tensors.get(HEAD)
    if ("head.weight",) in theirs or embedding is None or head is None or embedding.shape != head.shape:
        return False
    return embedding is head or bool(registry.owner(head, HEAD).namespace().all(embedding == head))


def _entries(layers: Mapping[str, Layer], known: Architecture, architecture: str, prefix: str) -> list[Entry]:
    entries = []
    for part, layer in parts_of(layers).items():
        found = [entry.within("", f"{part}.") for entry in _of_part(part, layer, known, architecture)]
        entries += [entry if entry.theirs == HEAD else entry.within(prefix, "") for entry in found]
    return entries


def _of_part(part: str, layer: Layer, known: Architecture, architecture: str) -> list[Entry]:
    """Return the entries of one layer, by its own names."""
    number = re.fullmatch(r"blocks\.(\d+)", part)
    if number and isinstance(layer, TransformerBlock):
        modules = {known.block.format(number[1]) + theirs: ours for theirs, ours in known.of_block.items()}
    elif part in known.parts:
        modules = {known.parts[part]: ("",)}
    elif part == "head" and architecture != "bert":
        modules = {HEAD.removesuffix(".weight"): ("",)}
    else:
        names = ", ".join([*known.parts, "blocks.N", *([] if architecture == "bert" else ["head"])])
        raise ArgumentError(f"layers: expected some of {architecture}'s {names}, got {part!r}: {type(layer).__name__}")
    transposed = part in ("head", "pooler") or (known.transposed and number is not None)
    matrices = {name for name, x in layer.parameters().items() if x.ndim == 2}
    entries = []
    for theirs, modules_of_ours in modules.items():
        for kind in ("weight", "bias"):
            ours = tuple(f"{module}.{kind}".lstrip(".") for module in modules_of_ours)
            entries.append(Entry(f"{theirs}.{kind}", ours, transposed and set(ours) <= matrices))
    return covering(entries, layer, architecture)
