"""polyattn's layers from torch's modules, and polyattn's parameters copied into torch's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from ...errors import ArgumentError, CheckpointError
from ...layers import Layer, LayerNorm, MultiHeadAttention, Projection, TransformerBlock
from ..weights import from_torch, to_torch

__all__ = ["copy_to", "from_module"]


def from_module(module: Any, *, backend: str | None = None, device: str | None = None) -> Layer:
    """Return a layer of polyattn that computes the same as a module of torch, with copies of its parameters.

    Parameters
    ----------
    module : nn.Linear, nn.LayerNorm, nn.MultiheadAttention or nn.TransformerEncoderLayer
        The layer's inputs have the batch axis first, whether or not the module has ``batch_first=True``.
    backend, device : str, optional
        Where the layer is bound, as for the constructor of a layer.

    Returns
    -------
    Projection, LayerNorm, MultiHeadAttention or TransformerBlock
        In the dtype of the module. Dropout of the attention weights is an argument of the call here:
        ``layer(x, dropout=module.dropout)``; an encoder layer's other dropouts are left out.

    Raises
    ------
    ArgumentError
        If the module has another type, or an option that polyattn's layer lacks: ``add_bias_kv``, ``add_zero_attn``,
        normalisation of several axes or without weights, an activation other than relu, gelu or silu.

    Examples
    --------
    >>> import torch
    >>> from polyattn.interop.torch import from_module
    >>> from_module(torch.nn.Linear(4, 2), backend="numpy")
    Projection(in_features=4, out_features=2, bias=True, dtype='float32', backend='numpy')
    """
    for kind, made in KINDS.items():
        if isinstance(module, kind):
            layer = made(module, {"dtype": _dtype(module), "backend": backend, "device": device})
            layer.load_parameters(from_torch(module.state_dict(), layer))
            return layer
    known = ", ".join(f"nn.{kind.__name__}" for kind in KINDS)
    raise ArgumentError(f"module: expected one of {known}, got {type(module).__name__}")


def copy_to(layer: Layer, module: Any) -> None:
    """Copy a layer's parameters into a torch module of the same architecture.

    Parameters
    ----------
    layer : Projection, LayerNorm, MultiHeadAttention or TransformerBlock
        On any backend.
    module : nn.Linear, nn.LayerNorm, nn.MultiheadAttention or nn.TransformerEncoderLayer
        Changed in place, unless an error is raised.

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
    like.expect_parameters(there.parameters())
    if like.config() != layer.config():
        raise CheckpointError(f"module: expected one like {layer!r}, got one like {like!r}")
    module.load_state_dict(to_torch(there.parameters(), there))


# ---- the layer for a module, for each type -------------------------------------------------------------------------


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
    }
    if any(lacking.values()):
        options = ", ".join(name for name, there in lacking.items() if there)
        raise ArgumentError(f"module: expected nn.MultiheadAttention without {options}, which MultiHeadAttention lacks")
    widths = {"d_key": module.kdim, "d_value": module.vdim}
    return MultiHeadAttention(
        module.embed_dim, module.num_heads, **widths, bias=module.in_proj_bias is not None, **where
    )


def _block(module: Any, where: dict[str, Any]) -> Layer:
    if module.norm1.eps != module.norm2.eps:
        raise ArgumentError(f"module: expected norms of one eps, got {module.norm1.eps} and {module.norm2.eps}")
    attention = module.self_attn
    return TransformerBlock(
        attention.embed_dim, attention.num_heads, module.linear1.out_features, norm_first=module.norm_first,
        eps=module.norm1.eps, activation=_activation(module.activation), bias=module.linear1.bias is not None, **where,
    )  # fmt: skip


def _activation(activation: Any) -> str:
    """Return polyattn's name of an encoder layer's activation, which is a function or a module."""
    for name, (function, kind) in ACTIVATIONS.items():
        if activation is function or isinstance(activation, kind):
            tanh = getattr(activation, "approximate", "none") == "tanh"
            return f"{name}_tanh" if tanh else name
    raise ArgumentError(f"module: expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")


ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "relu": (functional.relu, torch.nn.ReLU),
    "gelu": (functional.gelu, torch.nn.GELU),
    "silu": (functional.silu, torch.nn.SiLU),
}
KINDS: dict[Any, Callable[[Any, dict[str, Any]], Layer]] = {
    torch.nn.MultiheadAttention: _attention,
    torch.nn.TransformerEncoderLayer: _block,
    torch.nn.LayerNorm: _layer_norm,
    torch.nn.Linear: _projection,
}


def _dtype(module: Any) -> str:
    dtypes = (str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters())
    return next(dtypes, "float32")
