"""What a compiled program is compiled for: torch.compile traces Python, and these functions say where it need not."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = ["concrete", "constant_result"]


def constant_result(function: Function) -> Function:
    """Mark a function whose result is a constant of the program: it is called while torch compiles, and not traced.

    Its arguments are constants too, numbers by way of :func:`concrete`. This is
    ``torch.compiler.assume_constant_result``, without importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def concrete(x: Any) -> Any:
    """Return a number, or a tuple or list of them, by value where torch.compile has made them symbolic.

    The program is then compiled for these values, and again for others.
    """
    if isinstance(x, tuple):
        return tuple([concrete(y) for y in x])
    if isinstance(x, list):
        return [concrete(y) for y in x]
    if isinstance(x, float):
        return math.ldexp(*math.frexp(x))  # the same number; torch.compile computes both on values alone
    if isinstance(x, int) and not isinstance(x, bool):
        return operator.index(x)
    return x
