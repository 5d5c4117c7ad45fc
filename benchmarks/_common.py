"""What the scripts share: the standard shapes, and progress on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from polyattn.bench import parse_shape

SHAPES = tuple(map(parse_shape, ("1,8,2048,64", "4,8,512,64", "1,8,4096,64", "1,8,2048,128", "8,12,128,64")))
LONG = tuple(shape for shape in SHAPES if shape.n_k >= 2048)
LAYERS = tuple(map(parse_shape, ("1,8,2048,64", "4,8,512,64", "8,8,128,64")))  # d_model 512, 8 heads
DECODE, TINY = parse_shape("1,8,1:4096,64"), parse_shape("1,1,4,8")


def named(names: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return the names that are wanted: a whole name is that one, else it is the beginning of some; nothing is all."""
    there = list(names)
    return [n for n in there if not wanted or any(n == w or (w not in there and n.startswith(w)) for w in wanted)]


def told(doing: str, done: float) -> None:
    """Show progress on a terminal's standard error."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{done:4.0%}  {doing}", end="" if done < 1 else "\r\x1b[2K", file=sys.stderr, flush=True)


def told_all() -> None:
    """Wipe the progress away."""
    if sys.stderr.isatty():
        print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
