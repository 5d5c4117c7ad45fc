"""Records of arrays: flattening to a tuple of arrays, and rebuilding.

A record is an array, None, a number, a tuple, a NamedTuple, a dict or a :class:`Record`, nested. Automatic
differentiation and compilers need flat arrays; :func:`flatten` is the one place that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

from ._arrays import Array
from ._structure import StructuredBias, StructuredMask

__all__ = ["Record", "Structure", "flatten"]

NUMBERS = (bool, int, float, str)  # exact types: NumPy's float64 scalar is a subclass of float, and is an array
STRUCTURED = (StructuredMask, StructuredBias)


class Record:
    """A frozen dataclass that holds arrays in the fields that ``ARRAYS`` names. The other fields are static.

    :meth:`polyattn.backend.Backend.register` requires ``flattened`` and ``unflattened``. Static fields can be
    hashed and compared. A field of ``ARRAYS`` that holds no array (None, a number, a structured mask)
    is static too.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = ()

    def flattened(self) -> tuple[tuple[Array, ...], Structure]:
        """Return the arrays, and the structure that rebuilds the record from as many arrays."""
        return flatten(self)

    @classmethod
    def unflattened(cls, structure: Structure, arrays: Sequence[Array]) -> Self:
        """Return a record of this structure with other arrays."""
        record: Self = structure.build(arrays)
        return record


class Leaf(NamedTuple):
    """An array, given by its index in the flat arrays."""

    number: int


class Static(NamedTuple):
    """A value that is not an array."""

    value: Any


class Node(NamedTuple):
    """A record that holds others."""

    kind: Any
    names: tuple[str, ...]
    children: tuple[Leaf | Static | Node, ...]


class Structure(NamedTuple):
    """A record without its arrays. It can be hashed and compared, and holds no reference to an array."""

    root: Leaf | Static | Node
    names: tuple[str, ...]
    """The field name of each flat array."""

    def build(self, arrays: Sequence[Array]) -> Any:
        """Return a record with these arrays."""
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
