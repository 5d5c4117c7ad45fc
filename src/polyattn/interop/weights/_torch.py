"""Weights of torch's layers: (out, in), and in self-attention one matrix for queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...backend import Array
from ...errors import ArgumentError
from ...layers import Embedding, Layer, LayerNorm, MultiHeadAttention, Projection, RMSNorm, TransformerBlock
from ._entries import Entry, covering, expect_options, read, write
from ._layers import Layers, dotted, entries_of, shapes_of

__all__ = ["from_torch", "to_torch"]


def from_torch(state: Mapping[str, Array], layers: Layers) -> dict[str, Array]:
    """Return a state dict of torch under our names, with weights as (in, out).

    Parameters
    ----------
    state : dict
        ``module.state_dict()``, or the same from a file: tensors, or arrays of any other library.
    layers : Layer, or dict of layers by name
        The layers for the parameters: a Projection, LayerNorm, RMSNorm, Embedding, MultiHeadAttention or
        TransformerBlock; or several by the names of their modules, ``{"encoder.layers.0": block, …}``.

    Returns
    -------
    dict
        For ``layer.load_parameters``, or :func:`load` with several layers. In-projections may be packed
        (``in_proj_weight``) or separate (``q_proj_weight``, …).

    Raises
    ------
    CheckpointError
        If names or shapes are not those of these layers in torch; the message lists all of them.
    ArgumentError
        If a layer has no counterpart in torch, or has options that the counterpart lacks.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> from polyattn.interop.weights import from_torch
    >>> from_torch({"weight": np.ones((2, 4)), "bias": np.zeros(2)}, pa.Projection(4, 2))["weight"].shape
    (4, 2)
    """

    def entries(part: str, layer: Layer) -> list[Entry]:
        return _entries(layer, isinstance(state, Mapping) and dotted(part, "q_proj_weight") in state)

    return read("state", state, entries_of(layers, entries), shapes_of(layers), "that torch has for these layers")


def to_torch(parameters: Mapping[str, Array], layers: Layers, *, packed: bool = True) -> dict[str, Array]:
    """Return parameters under torch's names and in its shapes: the reverse of :func:`from_torch`.

    Parameters
    ----------
    parameters : dict
        As :func:`parameters_of` returns them, or trained; arrays of any library.
    layers : Layer, or dict of layers by name
        As for :func:`from_torch`.
    packed : bool
        Whether self-attention has one ``in_proj_weight``; else ``q_proj_weight``, ``k_proj_weight``,
        ``v_proj_weight``, as ``torch.nn.functional.multi_head_attention_forward`` takes them. If keys or values have
        another width, they are always separate.

    Returns
    -------
    dict
        For ``module.load_state_dict``, once converted to tensors.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of the layers.
    ArgumentError
        As :func:`from_torch`.

    Examples
    --------
    >>> import polyattn as pa
    >>> from polyattn.interop.weights import parameters_of, to_torch
    >>> layer = pa.MultiHeadAttention(8, 2)
    >>> {name: x.shape for name, x in to_torch(parameters_of(layer), layer).items()}  # doctest: +NORMALIZE_WHITESPACE
    {'in_proj_weight': (24, 8), 'in_proj_bias': (24,), 'out_proj.weight': (8, 8), 'out_proj.bias': (8,)}
    """
    return write(parameters, entries_of(layers, lambda part, layer: _entries(layer, not packed)), shapes_of(layers))


def _pair(theirs: str, ours: str, transposed: bool = False) -> tuple[Entry, ...]:
    return tuple(Entry(theirs + kind, (ours + kind,), transposed and kind == "weight") for kind in ("weight", "bias"))


def _of_all(kind: str) -> tuple[str, ...]:
    return tuple(f"{x}_proj.{kind}" for x in "qkv")


LINEAR, PLAIN = _pair("", "", transposed=True), _pair("", "")
PACKED = (
    Entry("in_proj_weight", _of_all("weight"), transposed=True),
    Entry("in_proj_bias", _of_all("bias")),
    *_pair("out_proj.", "out_proj.", transposed=True),
)
SEPARATE = (*(Entry(f"{x}_proj_weight", (f"{x}_proj.weight",), transposed=True) for x in "qkv"), *PACKED[1:])
BLOCK = (
    *(entry.within("self_attn.", "attention.") for entry in PACKED),
    *_pair("linear1.", "feed_forward.up_proj.", transposed=True),
    *_pair("linear2.", "feed_forward.down_proj.", transposed=True),
    *_pair("norm1.", "norm1."),
    *_pair("norm2.", "norm2."),
)
KINDS: dict[type[Layer], tuple[str, tuple[Entry, ...]]] = {
    Projection: ("nn.Linear", LINEAR),
    LayerNorm: ("nn.LayerNorm", PLAIN),
    RMSNorm: ("nn.RMSNorm", PLAIN),
    Embedding: ("nn.Embedding", PLAIN),
    MultiHeadAttention: ("nn.MultiheadAttention", PACKED),
    TransformerBlock: ("nn.TransformerEncoderLayer", BLOCK),
}


def _entries(layer: Layer, separate: bool) -> list[Entry]:
    theirs, entries = KINDS.get(type(layer), (None, ()))
    if theirs is None:
        known = ", ".join(kind.__name__ for kind in KINDS)
        raise ArgumentError(f"layers: expected some of {known}, got a {type(layer).__name__}")
    if isinstance(layer, MultiHeadAttention | TransformerBlock):
        expect_options(layer, theirs, **_options(layer.config()))
    if isinstance(layer, MultiHeadAttention) and (separate or {layer.d_key, layer.d_value} != {layer.d_model}):
        entries = SEPARATE
    return covering(entries, layer, theirs)


def _options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options that torch's layers lack; a window is an argument of the call, and in torch a mask."""
    heads, width = config["num_heads"], config["d_model"]
    size = width // heads
    options = {"num_kv_heads": heads, "head_dim": size, "value_dim": size, "scale": None, "rotary": None}
    return options | ({"norm": "layer"} if "norm" in config else {})
