"""Static values and constants in functions that torch.compile traces."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")

__all__ = ["concrete", "constant", "constant_result"]


def constant_result(function: Function) -> Function:
    """Mark a function that returns a constant: torch.compile calls it at compile time and does not trace it.

    Its arguments must be constants too; :func:`concrete` makes numbers constant. Same as
    ``torch.compiler.assume_constant_result``, without the import of torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # of torch
    return function


def constant(value: Value) -> Callable[[], Value]:
    """Return a function that returns ``value``, a constant of a module.

    With ``dynamic=True``, torch.compile makes module-level floats symbolic, and fails if two subgraphs read the same
    one; each operation with a backward has its own subgraph.
    """
    return constant_result(lambda: value)


def concrete(x: Any) -> Any:
    """Return a number, or a tuple, named tuple or list of numbers, with concrete values in place of symbolic ones.

    torch.compile then specialises the program for these values, and compiles again for other values.
    """
    if isinstance(x, tuple):
        values = [concrete(y) for y in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    if isinstance(x, list):
        return [concrete(y) for y in x]
    if isinstance(x, int | float) and not isinstance(x, bool):
        ((value, _),) = itertools.groupby((x,))  # x; torch.compile makes it concrete, also in a subgraph
        return value
    return x
