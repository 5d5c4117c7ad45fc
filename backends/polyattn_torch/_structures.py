"""Structured masks and biases as text, for custom operators of torch: ``AlibiBias(slopes=(0.25, 0.0625))``."""

from __future__ import annotations

import ast
from dataclasses import fields
from typing import Any

from polyattn.backend import StructuredBias, StructuredMask, concrete, constant_result

__all__ = ["structure_of", "text_of"]

KINDS = (StructuredBias, StructuredMask)
TABLE = "table"
"""The only field that is a tensor; the operators have a separate argument for it."""


def text_of(x: Any) -> str | None:
    """Return a structured mask or bias as text, without its table; None for a tensor or None."""
    if not isinstance(x, KINDS):
        return None
    given: Any = [(field.name, getattr(x, field.name)) for field in fields(x) if field.name != TABLE]  # type: ignore[arg-type]
    return f"{type(x).__name__}({', '.join([f'{name}={text_of(y) or literal(concrete(y))}' for name, y in given])})"


@constant_result
def literal(x: Any) -> str:
    """Return ``x`` as a Python literal."""
    return repr(x)


def structure_of(text: str | None) -> Any:
    """Reverse :func:`text_of`: return the structured mask or bias, or None."""
    return None if text is None else _built(ast.parse(text, mode="eval").body)


def _built(node: Any) -> Any:
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    kinds = {kind.__name__: kind for base in KINDS for kind in base.__subclasses__()}
    return kinds[ast.unparse(node.func)](**{str(field.arg): _built(field.value) for field in node.keywords})
