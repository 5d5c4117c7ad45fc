"""What a compiled program is compiled for: torch.compile traces Python, and these functions say where it need not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")

__all__ = ["concrete", "constant", "constant_result"]


def constant_result(function: Function) -> Function:
    """Mark a function whose result is a constant of the program: it is called while torch compiles, and not traced.

    Its arguments are constants too, numbers by way of :func:`concrete`. This is
    ``torch.compiler.assume_constant_result``, without importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def constant(value: Value) -> Callable[[], Value]:
    """Return a function that returns a constant of a module.

    With ``dynamic=True`` torch.compile makes floats of modules symbolic, and fails where two subgraphs, those of
    two operations with a backward, read the same one.
    """
    return constant_result(lambda: value)


def concrete(x: Any) -> Any:
    """Return a number, or a tuple, named tuple or list of them, by value where torch.compile has made them symbolic.

    The program is then compiled for these values, and again for others.
    """
    if isinstance(x, tuple):
        values = [concrete(y) for y in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    if isinstance(x, list):
        return [concrete(y) for y in x]
    if isinstance(x, int | float) and not isinstance(x, bool):
        ((value, _),) = itertools.groupby((x,))  # itself, in Python; torch.compile groups values, in a subgraph too
        return value
    return x
