"""Records of arrays: flattening to a tuple of arrays, and rebuilding.

A record is an array, None, a number, a tuple, a NamedTuple, a dict or a :class:`Record`, nested. Automatic
differentiation and compilers need flat arrays; :func:`flatten` is the one place that makes them.

``ARRAYS`` of a class names the fields that may hold arrays. The others are static, so they can be hashed and compared.
In a class without it, all fields may hold arrays. A field without arrays (None, a number, a structured mask) is static.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from ._arrays import Array
from ._structure import StructuredBias, StructuredMask

__all__ = ["Record", "Structure", "flatten", "holds"]

Kind = TypeVar("Kind", bound=type)

NUMBERS = (bool, int, float, str)  # exact types: NumPy's float64 scalar is a subclass of float, and is an array
STRUCTURED = (StructuredMask, StructuredBias)


class Record:
    """A frozen dataclass with arrays in the fields that ``ARRAYS`` names.

    :meth:`polyattn.backend.Backend.register` requires ``flattened`` and ``unflattened``.
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


def holds(*names: str) -> Callable[[Kind], Kind]:
    """Set ``ARRAYS`` of a NamedTuple, whose body may have no class variable."""

    def mark(kind: Kind) -> Kind:
        kind.ARRAYS = names  # type: ignore[attr-defined]  # see above
        return kind

    return mark


class Leaf(NamedTuple):
    """An array, given by its index in the flat arrays."""

    number: int


class Static(NamedTuple):
    """A value that is not an array."""

    value: Any


class Node(NamedTuple):
    """A record of which some fields hold arrays or other records."""

    kind: Any
    names: tuple[str, ...]
    values: tuple[Any, ...]
    """The static values by field; None where there is a child."""
    children: tuple[tuple[int, Leaf | Node], ...]
    """The fields that are not static: the index of each, and what it holds."""


class Structure(NamedTuple):
    """A record without its arrays. It can be hashed and compared, and holds no reference to an array."""

    root: Leaf | Static | Node
    names: tuple[str, ...]
    """The field name of each flat array."""

    def build(self, arrays: Sequence[Array]) -> Any:
        """Return a record with these arrays."""
        return _built(self.root, arrays)


class Found(NamedTuple):
    """The arrays of a record that were found so far, and the name of the field of each."""

    arrays: list[Array]
    names: list[str]

    def leaf(self, array: Array, name: str) -> Leaf:
        """Return the leaf of an array, which is added unless it is there already."""
        for number, other in enumerate(self.arrays):
            if other is array:
                return Leaf(number)
        self.arrays.append(array)
        self.names.append(name)
        return Leaf(len(self.arrays) - 1)


def flatten(record: Any) -> tuple[tuple[Array, ...], Structure]:
    """Return the arrays of a record, each once, and the structure that rebuilds the record."""
    found = Found([], [])
    root = _flattened(record, "", found)
    return tuple(found.arrays), Structure(root, tuple(found.names))


# Not a nested function, which would refer to itself: the arrays would live until the garbage collector runs.
def _flattened(value: Any, name: str, found: Found) -> Leaf | Static | Node:
    if value is None or type(value) in NUMBERS or isinstance(value, STRUCTURED):
        return Static(value)
    fields = _fields(value)
    if fields is None:
        return found.leaf(value, name)
    values, children, own = list(fields.values()), [], getattr(value, "ARRAYS", fields)
    for index, (field, x) in enumerate(fields.items()):
        if field in own and x is not None and type(x) not in NUMBERS:
            child = _flattened(x, field, found)
            if not isinstance(child, Static):
                values[index] = None
                children.append((index, child))
    if not children and isinstance(value, tuple):
        return Static(value)
    return Node(type(value), tuple(fields), tuple(values), tuple(children))


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a record by name, or None for an array."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None) or map(str, range(len(value)))
        return dict(zip(names, value, strict=True))
    if isinstance(value, dict):
        return value
    return vars(value) if isinstance(value, Record) else None


def _built(node: Leaf | Static | Node, arrays: Sequence[Array]) -> Any:
    if isinstance(node, Leaf):
        return arrays[node.number]
    if isinstance(node, Static):
        return node.value
    values = list(node.values)
    for index, child in node.children:
        values[index] = _built(child, arrays)
    if node.kind is tuple:
        return tuple(values)
    if node.kind is dict:
        return dict(zip(node.names, values, strict=True))
    return node.kind(**dict(zip(node.names, values, strict=True)))
