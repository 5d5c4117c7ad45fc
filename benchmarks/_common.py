"""The standard shapes, the command line and the progress display of the scripts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from polyattn.bench import parse_shape

SHAPES = tuple(map(parse_shape, ("1,8,2048,64", "4,8,512,64", "1,8,4096,64", "1,8,2048,128", "8,12,128,64")))
LONG = tuple(shape for shape in SHAPES if shape.n_k >= 2048)
LAYERS = tuple(map(parse_shape, ("1,8,2048,64", "4,8,512,64", "8,8,128,64")))  # d_model 512, 8 heads
DECODE = tuple(map(parse_shape, ("1,8,1:4096,64", "8,8,1:4096,64")))
TINY = parse_shape("1,1,4,8")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with a script's docstring as its help."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parsed(options: argparse.ArgumentParser, names: Iterable[str], arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ``wanted`` has the names with the given prefixes, or all. ``--list`` prints them."""
    options.add_argument("wanted", nargs="*", metavar="NAME", help="a name, or a prefix of names (default: all)")
    options.add_argument("--list", action="store_true", help="print the names")
    found, there = options.parse_args(arguments), list(names)
    asked = found.wanted
    found.wanted = [n for n in there if not asked or any(n == w or (w not in there and n.startswith(w)) for w in asked)]
    if not found.wanted:
        options.error("expected a prefix of a name (see --list)")
    if found.list:
        print(*found.wanted, sep="\n")
        options.exit()
    return found


def progress(doing: str, done: float) -> None:
    """Show progress on standard error, if it is a terminal; the line is cleared at the end."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{f'{done:4.0%}  {doing}' * (done < 1)}", end="", file=sys.stderr, flush=True)
