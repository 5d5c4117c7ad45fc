"""Weights of Keras's and Flax's attention, which have a separate axis for heads. Keras has paths, Flax nested dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...backend import Array
from ...errors import ArgumentError
from ...layers import Layer, MultiHeadAttention
from ._entries import Entry, covering, expect_options, read, write
from ._layers import Layers, entries_of, shapes_of

__all__ = ["from_flax", "from_keras", "to_flax", "to_keras"]

KERAS = {
    "q_proj.weight": "query/kernel", "q_proj.bias": "query/bias",
    "k_proj.weight": "key/kernel", "k_proj.bias": "key/bias",
    "v_proj.weight": "value/kernel", "v_proj.bias": "value/bias",
    "out_proj.weight": "attention_output/kernel", "out_proj.bias": "attention_output/bias",
}  # fmt: skip
FLAX = {
    "q_proj.weight": "query.kernel", "q_proj.bias": "query.bias",
    "k_proj.weight": "key.kernel", "k_proj.bias": "key.bias",
    "v_proj.weight": "value.kernel", "v_proj.bias": "value.bias",
    "out_proj.weight": "out.kernel", "out_proj.bias": "out.bias",
    "q_norm.weight": "query_ln.scale", "k_norm.weight": "key_ln.scale",
}  # fmt: skip


def from_keras(weights: Mapping[str, Array], layers: Layers) -> dict[str, Array]:
    """Return variables of Keras's attention under our names, without the axis of heads.

    Parameters
    ----------
    weights : dict
        ``{v.path.removeprefix(f"{layer.path}/"): v.numpy() for v in layer.weights}``: ``query/kernel``,
        ``query/bias``, ``key/kernel``, … ``attention_output/bias``; arrays of any library.
    layers : MultiHeadAttention, or dict of them by name
        The layers for the variables of ``keras.layers.MultiHeadAttention``, or of ``GroupQueryAttention`` if the
        layer has fewer heads of keys than of queries. With several layers by path, ``{"encoder/attention": layer,
        …}``, the names of the result are prefixed by the path and a dot.

    Returns
    -------
    dict
        For ``layer.load_parameters``, or :func:`load` with several layers.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of these layers in Keras; the message lists all of them.
    ArgumentError
        If a layer is not a MultiHeadAttention, or has options that Keras's lacks.

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
    return read(
        "weights", weights, entries_of(layers, _keras, "/"), shapes_of(layers), "that Keras has for these layers"
    )


def to_keras(parameters: Mapping[str, Array], layers: Layers) -> dict[str, Array]:
    """Return parameters under Keras's names and in its shapes: the reverse of :func:`from_keras`.

    Parameters
    ----------
    parameters : dict
        As :func:`parameters_of` returns them, or trained; arrays of any library.
    layers : MultiHeadAttention, or dict of them by name
        As for :func:`from_keras`.

    Returns
    -------
    dict
        In the order of ``layer.weights``: ``layer.set_weights(list(to_keras(…).values()))`` takes them.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of the layers.
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
    return write(parameters, entries_of(layers, _keras, "/"), shapes_of(layers))


def from_flax(state: Mapping[str, Any], layers: Layers) -> dict[str, Array]:
    """Return parameters of ``nnx.MultiHeadAttention`` under our names, without the axis of heads.

    Parameters
    ----------
    state : nested dict
        ``nnx.to_pure_dict(nnx.state(module, nnx.Param))``; Linen's ``variables["params"]`` is the same.
    layers : MultiHeadAttention, or dict of them by name
        The layers for the parameters; several by the dotted names of their modules in the whole model. A layer with
        ``qk_norm="layer"`` corresponds to ``normalize_qk=True``.

    Returns
    -------
    dict
        For ``layer.load_parameters``, or :func:`load` with several layers.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of these layers in Flax; the message lists all of them.
    ArgumentError
        If a layer is not a MultiHeadAttention, or has options that Flax's lacks.

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
    return read("state", flat, entries_of(layers, _flax), shapes_of(layers), "that Flax has for these layers")


def to_flax(parameters: Mapping[str, Array], layers: Layers) -> dict[str, Any]:
    """Return parameters as a nested dict of Flax's names and shapes: the reverse of :func:`from_flax`.

    Parameters
    ----------
    parameters : dict
        As :func:`parameters_of` returns them, or trained; arrays of any library.
    layers : MultiHeadAttention, or dict of them by name
        As for :func:`from_flax`.

    Returns
    -------
    nested dict
        For ``nnx.replace_by_pure_dict``.

    Raises
    ------
    CheckpointError
        If names or shapes are not those of the layers.
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
    for name, x in write(parameters, entries_of(layers, _flax), shapes_of(layers)).items():
        *path, last = name.split(".")
        inner = nested
        for key in path:
            inner = inner.setdefault(key, {})
        inner[last] = x
    return nested


def _keras(part: str, layer: Layer) -> list[Entry]:
    grouped = isinstance(layer, MultiHeadAttention) and layer.num_kv_heads != layer.num_heads
    theirs, lacks = "GroupQueryAttention" if grouped else "MultiHeadAttention", ("value_dim",) if grouped else ()
    return _entries(layer, KERAS, f"Keras's {theirs}", *lacks)


def _flax(part: str, layer: Layer) -> list[Entry]:
    normed = isinstance(layer, MultiHeadAttention) and layer.qk_norm
    return _entries(layer, FLAX, "nnx.MultiHeadAttention", "value_dim", *(("qk_norm", "qk_norm_eps") if normed else ()))


def _entries(layer: Layer, table: Mapping[str, str], theirs: str, *lacks: str) -> list[Entry]:
    """Return the entries of a layer by a table of names; ``lacks`` are options that their layer does not have."""
    if not isinstance(layer, MultiHeadAttention):
        raise ArgumentError(f"layers: expected MultiHeadAttention, got a {type(layer).__name__}")
    fixed = {"value_dim": layer.head_dim, "qk_norm": "layer", "qk_norm_eps": 1e-6}
    expect_options(layer, theirs, scale=None, rotary=None, **{name: fixed[name] for name in lacks})
    q, kv = layer.num_heads, layer.num_kv_heads
    heads = {"q_proj": (q, layer.head_dim), "k_proj": (kv, layer.head_dim), "v_proj": (kv, layer.value_dim)}
    entries, own = [], layer.parameters()
    for name in (name for name in table if name in own):
        # Heads are part of the last axis of an in-projection, and of the first axis of the out-projection.
        shape = (*own[name].shape[:-1], *heads.get(name.partition(".")[0], own[name].shape[-1:]))
        shape = (q, layer.value_dim, *shape[1:]) if name == "out_proj.weight" else shape
        entries.append(Entry(table[name], (name,), shape=shape))
    return covering(entries, layer, theirs)


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every array with its dotted path."""
    for name, x in state.items():
        if isinstance(x, Mapping):
            yield from _flat(x, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", x
