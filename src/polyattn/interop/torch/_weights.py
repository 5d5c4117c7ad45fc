"""torch's own layers as ours, and our parameters into torch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...backend import Array
from ...conversion import to_backend
from ...errors import ArgumentError, CheckpointError
from ...layers import LayerNorm, MultiHeadAttention, Projection
from ...layers._layer import Layer

__all__ = ["copy_to", "from_module"]

Tensor = Any
QKV = ("q", "k", "v")


def from_module(module: Any, *, backend: str | None = None, device: str | None = None) -> Layer:
    """Return a layer of ours that computes what a layer of torch's does, with copies of its parameters.

    Parameters
    ----------
    module : nn.Linear, nn.LayerNorm or nn.MultiheadAttention
        ``nn.MultiheadAttention`` always as with ``batch_first=True``: ours has the batch in front.
    backend, device : str, optional
        Where the layer is bound, as for a layer that is made.

    Returns
    -------
    Projection, LayerNorm or MultiHeadAttention
        In the dtype of the module. Dropout is an argument of the call here: ``layer(x, dropout=module.dropout)``.

    Raises
    ------
    ArgumentError
        If the module is another one, or has an option that ours lacks: ``add_bias_kv``, ``add_zero_attn``, keys or
        values of another width, normalisation of several axes or without weights.

    Examples
    --------
    >>> import torch
    >>> from polyattn.interop.torch import from_module
    >>> from_module(torch.nn.Linear(4, 2), backend="numpy")
    Projection(in_features=4, out_features=2, bias=True, dtype='float32', backend='numpy')
    """
    for kind, (made, _) in KINDS.items():
        if isinstance(module, kind):
            layer: Layer = made(module, {"dtype": _dtype(module), "backend": backend, "device": device})
            layer.load_parameters(_ours(module, layer))
            return layer
    known = ", ".join(f"nn.{kind.__name__}" for kind in KINDS)
    raise ArgumentError(f"module: expected one of {known}, got {type(module).__name__}")


def copy_to(layer: Layer, module: Any) -> None:
    """Copy a layer's parameters into a module of torch's of the same architecture.

    Parameters
    ----------
    layer : Projection, LayerNorm or MultiHeadAttention
        On any backend.
    module : nn.Linear, nn.LayerNorm or nn.MultiheadAttention
        Changed in place, whole or not at all.

    Raises
    ------
    ArgumentError
        If the module is of another kind than the layer.
    CheckpointError
        If the parameters do not fit.

    Examples
    --------
    >>> import torch
    >>> import polyattn as pa
    >>> from polyattn.interop.torch import copy_to
    >>> layer, module = pa.Projection(4, 2), torch.nn.Linear(4, 2)
    >>> copy_to(layer, module)
    >>> bool((module.weight.T.detach().numpy() == layer.parameters()["weight"]).all())
    True
    """
    like = from_module(module, backend="torch")
    if type(like) is not type(layer):
        raise ArgumentError(f"module: expected one that is a {type(layer).__name__}, got {type(module).__name__}")
    there = layer.to("torch")
    like._check(there.parameters())
    if like.config() != layer.config():
        raise CheckpointError(f"module: expected one like {layer!r}, got one like {like!r}")
    name = next(made for kind, (_, made) in KINDS.items() if isinstance(module, kind))
    state = name(there.parameters())
    module.load_state_dict({key: x for key, x in state.items() if key in module.state_dict()})


# ---- of each kind: our layer for a module, and the module's state dict from our parameters -------------------------


def _projection(module: Any, where: dict[str, Any]) -> Layer:
    return Projection(module.in_features, module.out_features, module.bias is not None, **where)


def _layer_norm(module: Any, where: dict[str, Any]) -> Layer:
    if len(module.normalized_shape) != 1 or module.weight is None:
        raise ArgumentError(f"module: expected a LayerNorm of the last axis with weights, got {module}")
    return LayerNorm(*module.normalized_shape, eps=module.eps, bias=module.bias is not None, **where)


def _attention(module: Any, where: dict[str, Any]) -> Layer:
    lacking = {
        "add_bias_kv": module.bias_k is not None,
        "add_zero_attn": module.add_zero_attn,
        "kdim or vdim": module.kdim != module.embed_dim or module.vdim != module.embed_dim,
    }
    if any(lacking.values()):
        options = ", ".join(name for name, there in lacking.items() if there)
        raise ArgumentError(f"module: expected nn.MultiheadAttention without {options}, which MultiHeadAttention lacks")
    return MultiHeadAttention(module.embed_dim, module.num_heads, bias=module.in_proj_bias is not None, **where)


def _state_of_projection(parameters: Mapping[str, Array]) -> dict[str, Tensor]:
    return {name: x.T if name == "weight" else x for name, x in parameters.items()}


def _state_of_layer_norm(parameters: Mapping[str, Array]) -> dict[str, Tensor]:
    return dict(parameters)


def _state_of_attention(parameters: Mapping[str, Array]) -> dict[str, Tensor]:
    """Pack the three projections of the input: torch has one matrix (3·d_model, d_model) for them."""
    state = {"out_proj.weight": parameters["out_proj.weight"].T}
    state["in_proj_weight"] = torch.cat([parameters[f"{x}_proj.weight"].T for x in QKV])
    if "out_proj.bias" in parameters:
        state["out_proj.bias"] = parameters["out_proj.bias"]
        state["in_proj_bias"] = torch.cat([parameters[f"{x}_proj.bias"] for x in QKV])
    return state


KINDS: dict[Any, tuple[Any, Any]] = {
    torch.nn.MultiheadAttention: (_attention, _state_of_attention),
    torch.nn.LayerNorm: (_layer_norm, _state_of_layer_norm),
    torch.nn.Linear: (_projection, _state_of_projection),
}


def _ours(module: Any, layer: Layer) -> dict[str, Array]:
    """Return a module's parameters under our names, weights as (in, out)."""
    state = {name: x.detach() for name, x in module.state_dict().items()}
    if isinstance(module, torch.nn.MultiheadAttention):
        weights, biases = state.pop("in_proj_weight").chunk(3), state.pop("in_proj_bias", None)
        for x, weight in zip(QKV, weights, strict=True):
            state[f"{x}_proj.weight"] = weight
        if biases is not None:
            state |= {f"{x}_proj.bias": bias for x, bias in zip(QKV, biases.chunk(3), strict=True)}
    turned = {name: x.T if x.ndim == 2 else x for name, x in state.items()}
    return {name: to_backend(turned[name], layer.backend, layer.device) for name in layer.parameters()}


def _dtype(module: Any) -> str:
    dtypes = (str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters())
    return next(dtypes, "float32")
