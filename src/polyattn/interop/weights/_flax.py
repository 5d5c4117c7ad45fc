"""Flax's attention: heads have an axis of their own, and parameters are nested dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...backend import Array
from ...errors import ArgumentError
from ...layers import Layer, MultiHeadAttention
from ._entries import Entry, covering, expect_options, read, write
from ._layers import Layers, dotted, parts_of, shapes_of

__all__ = ["from_flax", "split_heads", "to_flax"]

THEIRS = "nnx.MultiHeadAttention"


def from_flax(state: Mapping[str, Any], layers: Layers) -> dict[str, Array]:
    """Return parameters of ``nnx.MultiHeadAttention`` under our names, and without the axis of the heads.

    Parameters
    ----------
    state : nested dict
        ``nnx.to_pure_dict(nnx.state(module, nnx.Param))``; Linen's ``variables["params"]`` is the same.
    layers : MultiHeadAttention, or dict of them by name
        What the parameters are for; several under the dotted names of their modules in the whole model. One with
        ``qk_norm="layer"`` is for ``normalize_qk=True``.

    Returns
    -------
    dict
        What ``layer.load_parameters``, or :func:`load` for several, takes.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of these layers in Flax; the message lists all of them.
    ArgumentError
        If a layer is no MultiHeadAttention, or has options that Flax's lacks.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> from polyattn.interop.weights import from_flax
    >>> state = {name: {"kernel": np.ones((8, 2, 4))} for name in ("query", "key", "value")}
    >>> state["out"] = {"kernel": np.ones((2, 4, 8))}
    >>> from_flax(state, pa.MultiHeadAttention(8, 2, bias=False))["k_proj.weight"].shape
    (8, 8)
    """
    flat = dict(_flat(state)) if isinstance(state, Mapping) else state
    return read("state", flat, _all_entries(layers), shapes_of(layers), "that Flax has for these layers")


def to_flax(parameters: Mapping[str, Array], layers: Layers) -> dict[str, Any]:
    """Return parameters as a nested dict of Flax's names and shapes: the reverse of :func:`from_flax`.

    Parameters
    ----------
    parameters : dict
        As :func:`parameters_of` gives them, or as they were trained; arrays of any library.
    layers : MultiHeadAttention, or dict of them by name
        As for :func:`from_flax`.

    Returns
    -------
    nested dict
        What ``nnx.replace_by_pure_dict`` takes.

    Raises
    ------
    CheckpointError
        If the parameters are not those of the layers.
    ArgumentError
        As :func:`from_flax`.

    Examples
    --------
    >>> import polyattn as pa
    >>> from polyattn.interop.weights import parameters_of, to_flax
    >>> layer = pa.MultiHeadAttention(8, 2)
    >>> to_flax(parameters_of(layer), layer)["out"]["kernel"].shape
    (2, 4, 8)
    """
    nested: dict[str, Any] = {}
    for name, x in write(parameters, _all_entries(layers), shapes_of(layers)).items():
        *path, last = name.split(".")
        inner = nested
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = x
    return nested


def split_heads(layer: MultiHeadAttention) -> list[Entry]:
    """Return the entries of four kernels and biases whose heads have an axis, as Keras and Flax have them."""
    heads, kv, size = layer.num_heads, layer.num_kv_heads, layer.head_dim
    per_head = {"query": (heads, size), "key": (kv, size), "value": (kv, layer.value_dim)}
    widths = {"query": layer.d_model, "key": layer.d_key, "value": layer.d_value}
    entries = []
    for theirs, shape in per_head.items():
        ours = f"{theirs[0]}_proj"
        entries.append(Entry(f"{theirs}.kernel", (f"{ours}.weight",), shape=(widths[theirs], *shape)))
        entries.append(Entry(f"{theirs}.bias", (f"{ours}.bias",), shape=shape))
    entries.append(Entry("out.kernel", ("out_proj.weight",), shape=(heads, layer.value_dim, layer.d_model)))
    return [*entries, Entry("out.bias", ("out_proj.bias",))]


def _all_entries(layers: Layers) -> list[Entry]:
    return [entry for part, layer in parts_of(layers).items() for entry in _entries(part, layer)]


def _entries(part: str, layer: Layer) -> list[Entry]:
    if not isinstance(layer, MultiHeadAttention):
        raise ArgumentError(f"layers: expected MultiHeadAttention, got a {type(layer).__name__}")
    normed = {"qk_norm": "layer", "qk_norm_eps": 1e-6} if layer.qk_norm else {}
    expect_options(layer, THEIRS, value_dim=layer.head_dim, scale=None, rotary=None, **normed)
    norms = [Entry(f"{name}_ln.scale", (f"{name[0]}_norm.weight",)) for name in ("query", "key")]
    prefix = dotted(part, "")
    return [entry.within(prefix, prefix) for entry in covering([*split_heads(layer), *norms], layer, THEIRS)]


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every array with its dotted path."""
    for name, x in state.items():
        if isinstance(x, Mapping):
            yield from _flat(x, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", x
