"""Formulas as MathML, which browsers render: no script, and nothing is loaded from other servers."""

from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert


def inline(writer: Any, node: Any) -> None:
    """Write a formula within a line."""
    writer.body.append(convert(node.astext()))
    raise SkipNode


def block(writer: Any, node: Any) -> None:
    """Write a displayed formula, or aligned equations."""
    formula = node.astext().strip()
    if "&" in formula or r"\\" in formula:
        formula = rf"\begin{{align*}}{formula}\end{{align*}}"
    writer.body.append(f'<div class="math">{convert(formula, display="block")}</div>')
    raise SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer with Sphinx."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True}
