"""Records of arrays: flattened to a tuple of arrays, and rebuilt.

A record is an array, None, a number, a tuple, a NamedTuple, a dict or a :class:`Record`, nested. Automatic
differentiation and compilers need flat arrays; :func:`flatten` is the one place that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

from ._arrays import Array
from ._structure import StructuredBias, StructuredMask

__all__ = ["Record", "Structure", "flatten"]

NUMBERS = (bool, int, float, str)  # by exact type: NumPy's float64 scalar is a float too, and it is an array
STRUCTURED = (StructuredMask, StructuredBias)


class Record:
    """A frozen dataclass that holds arrays in the fields that ``ARRAYS`` names. The other fields are static.

    ``flattened`` and ``unflattened`` are what :meth:`polyattn.backend.Backend.register` asks of a class. Static
    fields can be hashed and compared. A field of ``ARRAYS`` that holds no array (None, a number, a structured mask)
    is static too.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ()

    def flattened(self) -> tuple[tuple[Array, ...], Structure]:
        """Return the arrays, and what rebuilds the record from as many arrays."""
        return flatten(self)

    @classmethod
    def unflattened(cls, structure: Structure, arrays: Sequence[Array]) -> Self:
        """Return the record with these arrays in the places of the old ones."""
        record: Self = structure.build(arrays)
        return record


class Leaf(NamedTuple):
    """An array, by its number among the flat arrays."""

    number: int


class Static(NamedTuple):
    """A value that is no array."""

    value: Any


class Node(NamedTuple):
    """A record that holds others."""

    kind: Any
    names: tuple[str, ...]
    children: tuple[Leaf | Static | Node, ...]


class Structure(NamedTuple):
    """What a record is besides its arrays. It can be hashed and compared, and keeps no array alive."""

    root: Leaf | Static | Node
    names: tuple[str, ...]
    """The field of each flat array."""

    def build(self, arrays: Sequence[Array]) -> Any:
        """Return the record with these arrays."""
        return _built(self.root, arrays)


def flatten(record: Any) -> tuple[tuple[Array, ...], Structure]:
    """Return the arrays of a record, each once, and the structure that rebuilds the record."""
    arrays: list[Array] = []
    names: list[str] = []

    def visit(value: Any, name: str) -> Leaf | Static | Node:
        if value is None or type(value) in NUMBERS or isinstance(value, STRUCTURED):
            return Static(value)
        if isinstance(value, Record):
            held = vars(value)
            children = (visit(x, n) if n in value.ARRAYS else Static(x) for n, x in held.items())
            return Node(type(value), tuple(held), tuple(children))
        if isinstance(value, dict):
            return Node(dict, tuple(value), tuple(visit(x, n) for n, x in value.items()))
        if isinstance(value, tuple):
            fields = getattr(type(value), "_fields", tuple(map(str, range(len(value)))))
            return Node(type(value), tuple(fields), tuple(visit(x, n) for n, x in zip(fields, value, strict=True)))
        for index, array in enumerate(arrays):
            if array is value:
                return Leaf(index)
        arrays.append(value)
        names.append(name)
        return Leaf(len(arrays) - 1)

    root = visit(record, "")
    return tuple(arrays), Structure(root, tuple(names))


def _built(node: Leaf | Static | Node, arrays: Sequence[Array]) -> Any:
    if isinstance(node, Leaf):
        return arrays[node.number]
    if isinstance(node, Static):
        return node.value
    children = [_built(child, arrays) for child in node.children]
    if node.kind is tuple:
        return tuple(children)
    if node.kind is dict:
        return dict(zip(node.names, children, strict=True))
    return node.kind(**dict(zip(node.names, children, strict=True)))
