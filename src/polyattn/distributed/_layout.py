"""Which positions of a sequence each rank has: one piece in order, or two in the zig-zag order that balances causality.

With causal attention the last positions attend to the most keys. In the zig-zag order the sequence has two pieces for
each rank, and rank r of P has the pieces r and 2P − 1 − r: each rank has the same number of allowed pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

from ..errors import ArgumentError
from ..kernels import StructuredBias
from ._block import Span

__all__ = ["LAYOUTS", "Layout", "expect_layout", "expect_no_pairs", "lengths_of", "pieces_of"]

Layout = Literal["contiguous", "zigzag"]
LAYOUTS = ("contiguous", "zigzag")
NOT_SHARED = "a shard has no rows and columns of an n_q × n_k array; use causal, window, key_lengths or segment_ids"


def lengths_of(n: int, ranks: int, layout: Layout) -> list[int]:
    """Return the number of positions of each rank if n positions are shared as evenly as possible."""
    expect_layout(layout)
    count = ranks if layout == "contiguous" else 2 * ranks
    even = [n // count + (i < n % count) for i in range(count)]
    return even if layout == "contiguous" else [even[r] + even[-1 - r] for r in range(ranks)]


def pieces_of(lengths: Sequence[int], layout: Layout) -> list[tuple[Span, ...]]:
    """Return the pieces of each rank, in the order in which it has them, from the number of positions of each rank."""
    expect_layout(layout)
    if layout == "contiguous":
        starts = [0, *accumulate(lengths)]
        return [(Span(start, length),) for start, length in zip(starts, lengths, strict=False)]
    early = [n - n // 2 for n in lengths]
    in_order = [*early, *(n // 2 for n in reversed(lengths))]
    spans = [Span(start, n) for start, n in zip([0, *accumulate(in_order)], in_order, strict=False)]
    return [(spans[r], spans[-1 - r]) for r in range(len(lengths))]


def expect_layout(layout: str) -> None:
    """Require the name of a layout."""
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")


def expect_no_pairs(mask: Any, bias: Any) -> None:
    """Require no mask, and no bias that is an array."""
    if mask is not None:
        raise ArgumentError(f"mask: expected None, got {type(mask).__name__}: {NOT_SHARED}")
    if not isinstance(bias, StructuredBias | None):
        raise ArgumentError(f"bias: expected a structured bias, got {type(bias).__name__}: {NOT_SHARED}")
