"""A layer as a torch module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed

from ...backend import Place, dtype_name
from ...conversion import to_backend
from ...errors import CheckpointError
from ...layers import Layer
from ._autocast import asked_for, lowered
from ._elsewhere import Pull, elsewhere

__all__ = ["LayerModule", "to_module"]

Tensor = Any


class LayerModule(torch.nn.Module):  # type: ignore[misc]  # torch is Any to the type checker
    """A layer with torch Parameters, made by :func:`to_module`.

    It takes the arguments of the layer. Its state dict has the layer's names.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        for name, parameter in layer.parameters().items():
            *path, last = name.split(".")
            owner: Any = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner._modules[part]
            owner.register_parameter(last, torch.nn.Parameter(to_backend(parameter, "torch", copy=True)))

    def forward(self, *inputs: Tensor, **arguments: Any) -> Tensor:
        """Return the layer's result; inputs, floating arguments and parameters have gradients.

        Under ``torch.autocast`` a layer on torch computes in the dtype of autocast, with sums in float32; a layer on
        another backend computes in its own dtype.
        """
        layer, parameters = self.layer, self._expected()
        first: Any = next(iter(parameters.values()), None)
        dtype, device = (layer.dtype, layer.device) if first is None else (dtype_name(first.dtype), str(first.device))
        asked = asked_for(next(iter((*parameters.values(), *inputs, *arguments.values())), None))
        if asked is not None:
            dtype = dtype_name(asked) if layer.backend == "torch" else dtype
            inputs = tuple(lowered(x, dtype) for x in inputs)
            arguments = {name: lowered(x, dtype) for name, x in arguments.items()}
            parameters = {name: lowered(x, dtype) for name, x in parameters.items()}
        if layer.backend == "torch":
            bound: Any = layer.with_arrays(parameters, dtype=dtype, place=Place(layer.place.backend, device))
            return bound(*inputs, **arguments)
        floating = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        keywords = {name: x for name, x in arguments.items() if name not in floating}
        run = _running(layer, dtype, len(inputs), (*floating,), (*parameters,), keywords)
        return elsewhere(run, *inputs, *floating.values(), *parameters.values())

    def extra_repr(self) -> str:
        """Return the layer's ``repr``."""
        return repr(self.layer)

    def _expected(self) -> dict[str, Tensor]:
        """Return the current parameters by the layer's names, and check their shapes."""
        parameters = {}
        for name, like in self.layer.parameters().items():
            x = functools.reduce(getattr, name.split("."), self)
            if x.shape != like.shape:
                raise CheckpointError(f"{name}: expected {tuple(like.shape)}, got {tuple(x.shape)}")
            parameters[name] = x
        return parameters


def to_module(layer: Layer) -> LayerModule:
    """Return an ``nn.Module`` that computes a layer, with its own Parameters and a state dict.

    Parameters
    ----------
    layer : Layer
        Its parameters are copied. The module computes on the backend to which the layer is bound: torch, or another
        backend, to which it converts tensors and from which it converts results and gradients.

    Returns
    -------
    LayerModule

    Examples
    --------
    >>> import torch
    >>> import polyattn as pa
    >>> from polyattn.interop.torch import to_module
    >>> module = to_module(pa.MultiHeadAttention(16, 4, backend="torch"))
    >>> module(torch.ones(2, 5, 16), causal=True).sum().backward()
    >>> module.q_proj.weight.grad.shape, sorted(module.state_dict())[0]
    (torch.Size([16, 16]), 'k_proj.bias')
    """
    return LayerModule(layer)


def _running(
    layer: Layer, dtype: str, count: int, floating: tuple[str, ...], names: tuple[str, ...], keywords: dict[str, Any]
) -> Callable[..., tuple[Tensor, Pull]]:
    """Return the layer's forward on inputs, floating arguments and parameters, and its backward in their order."""

    def run(*tensors: Tensor) -> tuple[Tensor, Pull]:
        inputs, parameters = tensors[:count], tensors[count + len(floating) :]
        arguments = dict(zip(floating, tensors[count : count + len(floating)], strict=True))
        if distributed.is_available() and distributed.is_initialized():
            parameters = tuple(x.clone() for x in parameters)  # FSDP frees their memory before the backward
        there = {name: to_backend(x, layer.backend, layer.device) for name, x in zip(names, parameters, strict=True)}
        bound: Any = layer.with_arrays(there, dtype=dtype, place=layer.place)
        y, cache = bound.forward(*inputs, **arguments, **keywords)

        def pull(dy: Tensor) -> tuple[Tensor | None, ...]:
            dinputs, grads = bound.backward(dy, cache)
            positional = tuple(dinputs[:count])
            named = tuple(getattr(dinputs, name) for name in floating)
            home = (to_backend(grads[name], "torch", str(x.device)) for name, x in zip(names, parameters, strict=True))
            return (*positional, *named, *home)

        return y, pull

    return run
