"""How an array of another library's layer corresponds to parameters of ours, and the conversion in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ... import registry
from ...backend import Array
from ...conversion import place_of
from ...errors import ArgumentError, CheckpointError
from ...layers import Layer
from ...layers._layer import listed

__all__ = ["Entry", "Shape", "covering", "expect_fitting", "expect_options", "read", "write"]

Shape = tuple[int, ...]


class Entry(NamedTuple):
    """One array of their layer, and the parameters of ours that it contains, concatenated along our last axis."""

    theirs: str
    ours: tuple[str, ...]
    transposed: bool = False
    """Whether their array is (out, in)."""
    shape: Shape | None = None
    """The shape of their array, if it has an axis that ours lacks: one for the heads."""

    def within(self, theirs: str, ours: str) -> Entry:
        """Return the entry with prefixes, separators included, before the names of both sides."""
        return self._replace(theirs=theirs + self.theirs, ours=tuple(ours + name for name in self.ours))


def covering(entries: Iterable[Entry], layer: Layer, theirs: str) -> list[Entry]:
    """Return the entries whose parameters the layer has; raise if no entry holds one of its parameters."""
    own = layer.parameters()
    kept = [entry for entry in entries if set(entry.ours) <= set(own)]
    _expect_nothing(sorted(set(own) - {name for entry in kept for name in entry.ours}), layer, theirs)
    return kept


def expect_options(layer: Layer, theirs: str, **expected: Any) -> None:
    """Require the options that are fixed in their layer; with others the same weights give another result."""
    config = layer.config()
    others = [f"{name}={config[name]!r}" for name, value in expected.items() if config[name] != value]
    _expect_nothing(others, layer, theirs)


def _expect_nothing(beyond: Sequence[str], layer: Layer, theirs: str) -> None:
    if beyond:
        raise ArgumentError(
            f"layers: expected what {theirs} has as well, got a {type(layer).__name__} with {listed(beyond)}"
        )


def read(
    argument: str, theirs: Any, entries: Sequence[Entry], shapes: Mapping[str, Shape], whose: str,
    passed_over: Callable[[str], bool] = lambda name: False,
) -> dict[str, Array]:  # fmt: skip
    """Return parameters of these shapes from arrays of theirs; raise CheckpointError if these do not fit."""
    expect_fitting(argument, theirs, {entry.theirs: _shape(entry, shapes) for entry in entries}, whose, passed_over)
    parameters: dict[str, Array] = {}
    for entry in entries:
        parameters |= _parted(theirs[entry.theirs], entry, shapes)
    return {name: parameters[name] for name in shapes}


def write(parameters: Any, entries: Sequence[Entry], shapes: Mapping[str, Shape]) -> dict[str, Array]:
    """Return the arrays of theirs with these parameters: the reverse of :func:`read`."""
    expect_fitting("parameters", parameters, shapes, "of these layers")
    return {entry.theirs: _joined([parameters[name] for name in entry.ours], entry, shapes) for entry in entries}


def expect_fitting(
    argument: str, arrays: Any, shapes: Mapping[str, Shape], whose: str,
    passed_over: Callable[[str], bool] = lambda name: False,
) -> None:  # fmt: skip
    """Require arrays of these names and shapes; raise one error that lists every difference."""
    if not isinstance(arrays, Mapping):
        raise CheckpointError(f"{argument}: expected a dict of arrays by name, got {type(arrays).__name__}")
    faults = {
        "missing": [name for name in shapes if name not in arrays],
        "unexpected": sorted(name for name in map(str, arrays) if name not in shapes and not passed_over(name)),
        "misshapen": [
            f"{name} (expected {shape}, got {_outline(arrays[name])})"
            for name, shape in shapes.items()
            if name in arrays and _outline(arrays[name]) != str(shape)
        ],
    }
    found = [f"{what} {listed(names)}" for what, names in faults.items() if names]
    if found:
        raise CheckpointError(f"{argument}: expected the names and shapes {whose}, but {'; '.join(found)}")


# ---- one entry -----------------------------------------------------------------------------------------------------


def _parted(x: Array, entry: Entry, shapes: Mapping[str, Shape]) -> dict[str, Array]:
    xp, together = registry.owner(x, entry.theirs).namespace(), _together(entry, shapes)
    x = xp.reshape(x, together[::-1] if entry.transposed else together)
    x = xp.matrix_transpose(x) if entry.transposed else x
    parts, at = {}, 0
    for name in entry.ours:
        width = shapes[name][-1]
        parts[name] = _in_c_order(xp, x[..., at : at + width])
        at += width
    return parts


def _joined(parts: list[Array], entry: Entry, shapes: Mapping[str, Shape]) -> Array:
    xp = place_of(dict(zip(entry.ours, parts, strict=True))).backend.namespace()
    x = parts[0] if len(parts) == 1 else xp.concat(parts, axis=-1)
    x = _in_c_order(xp, xp.matrix_transpose(x) if entry.transposed else x)
    return xp.reshape(x, _shape(entry, shapes))


def _in_c_order(xp: Any, x: Array) -> Array:
    """Return a matrix in C order: writers of other libraries store an array's memory whatever its strides are."""
    return xp.reshape(xp.reshape(x, (-1,)), x.shape)


def _together(entry: Entry, shapes: Mapping[str, Shape]) -> Shape:
    """Return the shape of an entry's parameters, concatenated along the last axis."""
    *lead, _ = shapes[entry.ours[0]]
    return (*lead, sum(shapes[name][-1] for name in entry.ours))


def _shape(entry: Entry, shapes: Mapping[str, Shape]) -> Shape:
    together = _together(entry, shapes)
    return entry.shape or (together[::-1] if entry.transposed else together)


def _outline(x: Any) -> str:
    return str(tuple(x.shape)) if registry.looks_like_array(x) else type(x).__name__
