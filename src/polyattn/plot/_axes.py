"""What all plots share: Axes, conversion to NumPy and labels of positions."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

from ..conversion import to_backend
from ..errors import BackendUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

__all__ = ["drawable", "label_positions", "on_host", "plain"]

MOST_LABELS = 48


def drawable(axes: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the given Axes, or those of a new figure of that size in inches."""
    expect_matplotlib()
    if axes is not None:
        return axes
    from matplotlib import pyplot

    return pyplot.subplots(figsize=size, layout="constrained")[1]


def expect_matplotlib() -> None:
    """Raise BackendUnavailableError with the command to install matplotlib, if it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendUnavailableError('plot: it needs matplotlib; install it with: pip install "polyattn[plot]"')


def on_host(x: Any) -> np.ndarray[Any, Any]:
    """Convert an array of any library to NumPy, and to float64 unless it is boolean."""
    host = np.asarray(x if isinstance(x, np.ndarray | list | tuple) else to_backend(x, "numpy"))
    return host if host.dtype == bool else host.astype(np.float64)


def label_positions(axes: Axes, queries: Sequence[str] | int, keys: Sequence[str] | int) -> None:
    """Label queries on the y axis and keys on the x axis, by their names or by position."""
    for names, axis, label in ((keys, axes.xaxis, "key"), (queries, axes.yaxis, "query")):
        length = names if isinstance(names, int) else len(names)
        if isinstance(names, int) or length > MOST_LABELS:
            axis.set_ticks(range(0, length, max(1, length // 8)))
            axis.set_label_text(f"{label} position")
        else:
            axis.set_ticks(range(length), list(names))
            axis.set_label_text(label)
    if not isinstance(keys, int) and len(keys) <= MOST_LABELS:
        axes.tick_params(axis="x", rotation=90)


def plain(axes: Axes) -> None:
    """Hide the upper and right side of the frame."""
    axes.spines[["top", "right"]].set_visible(False)
