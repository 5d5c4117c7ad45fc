"""What a layer is besides its parameters, for a library that takes layers apart into arrays and puts them together."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._layer import Layer

__all__ = ["Frame"]


class Frame:
    """A layer without its parameters. Those are equal whose layers compute alike from parameters of the same names.

    It keeps no parameter alive: what is compiled for a layer is looked up by it.
    """

    __slots__ = ("_key", "state")

    def __init__(self, layer: Layer) -> None:
        self.state = {name: x for name, x in vars(layer).items() if name != "_parameters"}
        place = (self.state["_place"], self.state["_moves_inputs"])
        self._key = (type(layer), tuple(layer.parameters()), layer.dtype, place, _hashable(layer.config()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of :meth:`Layer.parameters`."""
        return self._key[1]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Frame) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<frame of {self._key[0].__name__}>"


def _hashable(x: Any) -> Hashable:
    """Return a layer's settings, dicts and lists among them, as something that can be looked up."""
    if isinstance(x, Mapping):
        return tuple((name, _hashable(value)) for name, value in sorted(x.items()))
    return tuple(map(_hashable, x)) if isinstance(x, list | tuple) else x
