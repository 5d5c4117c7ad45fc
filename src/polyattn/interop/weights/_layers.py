"""The parameters of one layer, or of several by name, as one dict, and loading such a dict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ...backend import Array
from ...errors import ArgumentError
from ...layers import Layer
from ._entries import Entry, Shape, expect_fitting

__all__ = ["Layers", "dotted", "entries_of", "load", "parameters_of", "parts_of", "shapes_of"]

Layers = Layer | Mapping[str, Layer]


def parameters_of(layers: Layers) -> dict[str, Array]:
    """Return the parameters of one layer, or of several by ``layer.parameter``.

    Parameters
    ----------
    layers : Layer, or dict of layers by name

    Raises
    ------
    ArgumentError
        If ``layers`` is anything else.

    Examples
    --------
    >>> import polyattn as pa
    >>> from polyattn.interop.weights import parameters_of
    >>> list(parameters_of({"norm": pa.LayerNorm(4), "head": pa.Projection(4, 2, bias=False)}))
    ['norm.weight', 'norm.bias', 'head.weight']
    """
    parts = parts_of(layers)
    return {dotted(part, name): x for part, layer in parts.items() for name, x in layer.parameters().items()}


def load(layers: Layers, parameters: Mapping[str, Array]) -> None:
    """Copy parameters by the names of :func:`parameters_of` into their layers.

    Parameters
    ----------
    layers : Layer, or dict of layers by name
        On any backend; changed in place, unless an error is raised.
    parameters : dict
        Arrays of any library.

    Raises
    ------
    CheckpointError
        If names, shapes or dtypes are not those of the layers.

    Examples
    --------
    >>> import polyattn as pa
    >>> from polyattn.interop.weights import load, parameters_of
    >>> old, new = ({"norm": pa.RMSNorm(4), "head": pa.Projection(4, 2, seed=seed)} for seed in (0, 1))
    >>> load(new, parameters_of(old))
    >>> bool((new["head"].parameters()["weight"] == old["head"].parameters()["weight"]).all())
    True
    """
    expect_fitting("parameters", parameters, shapes_of(layers), "of these layers")
    of_parts = [
        (layer, {name: parameters[dotted(part, name)] for name in layer.parameters()})
        for part, layer in parts_of(layers).items()
    ]
    for layer, of_layer in of_parts:
        layer.expect_parameters(of_layer)
    for layer, of_layer in of_parts:
        layer.load_parameters(of_layer)


def parts_of(layers: Layers) -> dict[str, Layer]:
    """Return layers by name; a single layer has the empty name."""
    if isinstance(layers, Layer):
        return {"": layers}
    if isinstance(layers, Mapping) and all(isinstance(layer, Layer) for layer in layers.values()):
        return dict(layers)
    raise ArgumentError(f"layers: expected a layer of polyattn, or a dict of layers by name, got {layers!r:.200}")


def dotted(part: str, name: str, separator: str = ".") -> str:
    """Return the name of a parameter, prefixed by that of its part, which may be empty."""
    return f"{part}{separator}{name}" if part else name


def shapes_of(layers: Layers) -> dict[str, Shape]:
    """Return the shape of every parameter by name."""
    return {name: tuple(x.shape) for name, x in parameters_of(layers).items()}


def entries_of(layers: Layers, of_layer: Callable[[str, Layer], Iterable[Entry]], separator: str = ".") -> list[Entry]:
    """Return the entries of one layer or of several, under the names of both sides in the whole model."""
    return [
        entry.within(dotted(part, "", separator), dotted(part, ""))
        for part, layer in parts_of(layers).items()
        for entry in of_layer(part, layer)
    ]
