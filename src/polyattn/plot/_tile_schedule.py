"""A plot of the generic kernel's tiles: those skipped, those that need a mask, and the order of computation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..errors import ShapeError
from ..kernels import Problem, Sizes, loops, tile_lengths
from ._axes import drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["tile_schedule"]

COLOURS = {"skipped": "#f2f2f2", "masked": "#E69F00", "whole": "#0072B2"}
MOST_NUMBERS = 256


def tile_schedule(
    n_q: int,
    n_k: int,
    *,
    heads: int = 1,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: int | None = None,
    axes: Axes | None = None,
) -> Axes:
    """Draw the tiles of the generic kernel (skipped, with a mask, or whole), and the order of computation.

    Parameters
    ----------
    n_q, n_k : int
        The numbers of queries and keys.
    heads : int
        The number of heads times the size of the batch: the larger, the smaller are the tiles.
    causal, q_offset, window, key_lengths
        As in :func:`polyattn.attention`; tiles in which they exclude every pair are skipped. Other arguments, and
        arrays, do not skip tiles.
    axes : matplotlib Axes, optional
        Where to draw; by default in a new figure.

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError
        If a length is below 1.
    BackendUnavailableError
        If matplotlib is missing.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from polyattn import plot
    >>> axes = plot.tile_schedule(4096, 4096, causal=True, axes=Figure().subplots())
    >>> axes.get_title()
    '10 of 16 tiles of 1024 × 1024: 4 with a mask, 6 skipped'
    """
    if min(n_q, n_k, heads) < 1:
        raise ShapeError(f"n_q, n_k, heads: expected 1 or more, got {n_q}, {n_k} and {heads}")
    problem = Problem(
        None, Sizes((), heads, heads, n_q, n_k, 1, 1), "float32", None, 1.0, causal=causal,
        window=window or (None, None), q_offset=n_k - n_q if q_offset is None else q_offset, key_lengths=key_lengths,
    )  # fmt: skip
    axes = drawable(axes, (6.4, 6.0))
    step_q, step_k = tile_lengths(problem)
    tiles = [(tile, loop) for loop in loops(problem) for tile in loop.tiles]
    axes.set_facecolor(COLOURS["skipped"])
    for number, (tile, loop) in enumerate(tiles, 1):
        _tile(axes, (int(tile.key), int(tile.query), loop.n_k, loop.n_q), loop.whole, number, len(tiles))
    axes.set(xlim=(0, n_k), ylim=(n_q, 0), xlabel="key position", ylabel="query position")
    count = math.ceil(n_q / step_q) * math.ceil(n_k / step_k)
    masked = sum(not loop.whole for _, loop in tiles)
    axes.set_title(
        f"{len(tiles)} of {count} tiles of {step_q} × {step_k}: {masked} with a mask, {count - len(tiles)} skipped"
    )
    _legend(axes)
    return axes


def _tile(axes: Axes, box: tuple[int, int, int, int], whole: bool, number: int, count: int) -> None:
    """Draw one tile, with its number in the order of computation if there are not too many."""
    from matplotlib.patches import Rectangle

    x, y, width, height = box
    colour = COLOURS["whole" if whole else "masked"]
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=0.8))
    if count <= MOST_NUMBERS:
        size = 9 if count <= 64 else 6
        axes.text(
            x + width / 2, y + height / 2, str(number), ha="center", va="center", fontsize=size,
            color="white" if whole else "black",
        )  # fmt: skip


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    names = {"whole": "whole", "masked": "with a mask", "skipped": "skipped"}
    handles = [Patch(facecolor=COLOURS[kind], edgecolor="#999999", label=name) for kind, name in names.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, frameon=False)
