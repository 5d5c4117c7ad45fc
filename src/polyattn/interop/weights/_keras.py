"""Keras's attention: heads have an axis of their own, and a variable's name is its path."""

from __future__ import annotations

from collections.abc import Mapping

from ...backend import Array
from ...errors import ArgumentError
from ...layers import Layer, MultiHeadAttention
from ._entries import Entry, covering, expect_options, read, write
from ._flax import split_heads
from ._layers import Layers, dotted, parts_of, shapes_of

__all__ = ["from_keras", "to_keras"]


def from_keras(weights: Mapping[str, Array], layers: Layers) -> dict[str, Array]:
    """Return variables of Keras's attention under our names, and without the axis of the heads.

    Parameters
    ----------
    weights : dict
        ``{v.path.removeprefix(f"{layer.path}/"): v.numpy() for v in layer.weights}``: ``query/kernel``,
        ``query/bias``, ``key/kernel``, … ``attention_output/bias``; arrays of any library.
    layers : MultiHeadAttention, or dict of them by name
        What the variables are for: ``keras.layers.MultiHeadAttention``, or ``GroupQueryAttention`` where the layer
        has fewer heads of keys than of queries. Several under their paths, ``{"encoder/attention": layer, …}``; then
        the names of the result begin with those, and a dot.

    Returns
    -------
    dict
        What ``layer.load_parameters``, or :func:`load` for several, takes.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of these layers in Keras; the message lists all of them.
    ArgumentError
        If a layer is no MultiHeadAttention, or has options that Keras's lacks.

    Notes
    -----
    Keras calls its layer with ``(query, value, key)``, ours is called with ``(query, key, value)``.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> from polyattn.interop.weights import from_keras
    >>> weights = {f"{name}/kernel": np.ones((8, 2, 3)) for name in ("query", "key", "value")}
    >>> weights["attention_output/kernel"] = np.ones((2, 3, 8))
    >>> from_keras(weights, pa.MultiHeadAttention(8, 2, head_dim=3, bias=False))["q_proj.weight"].shape
    (8, 6)
    """
    return read("weights", weights, _all_entries(layers), shapes_of(layers), "that Keras has for these layers")


def to_keras(parameters: Mapping[str, Array], layers: Layers) -> dict[str, Array]:
    """Return parameters under Keras's names and in its shapes: the reverse of :func:`from_keras`.

    Parameters
    ----------
    parameters : dict
        As :func:`parameters_of` gives them, or as they were trained; arrays of any library.
    layers : MultiHeadAttention, or dict of them by name
        As for :func:`from_keras`.

    Returns
    -------
    dict
        In the order of ``layer.weights``: ``layer.set_weights(list(to_keras(…).values()))`` takes them.

    Raises
    ------
    CheckpointError
        If the parameters are not those of the layers.
    ArgumentError
        As :func:`from_keras`.

    Examples
    --------
    >>> import polyattn as pa
    >>> from polyattn.interop.weights import parameters_of, to_keras
    >>> layer = pa.MultiHeadAttention(8, 2)
    >>> to_keras(parameters_of(layer), layer)["query/bias"].shape
    (2, 4)
    """
    return write(parameters, _all_entries(layers), shapes_of(layers))


def _all_entries(layers: Layers) -> list[Entry]:
    return [entry for part, layer in parts_of(layers).items() for entry in _entries(part, layer)]


def _entries(part: str, layer: Layer) -> list[Entry]:
    if not isinstance(layer, MultiHeadAttention):
        raise ArgumentError(f"layers: expected MultiHeadAttention, got a {type(layer).__name__}")
    grouped = layer.num_kv_heads != layer.num_heads
    theirs = "GroupQueryAttention" if grouped else "MultiHeadAttention"
    one_size = {"value_dim": layer.head_dim} if grouped else {}
    expect_options(layer, f"Keras's {theirs}", scale=None, rotary=None, **one_size)
    entries = [_named(entry) for entry in covering(split_heads(layer), layer, theirs)]
    return [entry.within(dotted(part, "", "/"), dotted(part, "")) for entry in entries]


def _named(entry: Entry) -> Entry:
    path = entry.theirs.replace(".", "/")
    return entry._replace(theirs=path.replace("out/", "attention_output/"))
