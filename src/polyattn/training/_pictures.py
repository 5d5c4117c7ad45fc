"""The two pictures of a run. Without matplotlib a run writes no pictures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import plot
from ..plot._file import write_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["attention_picture", "draw_pictures", "loss_picture"]


def draw_pictures(
    folder: Path,
    history: tuple[Sequence[int], Sequence[float]],
    baseline: float,
    weights: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any] | None,
    title: str,
    say: Callable[[str], None],
) -> None:
    """Write ``loss.png`` and ``attention.png``; without matplotlib, print one line instead."""
    if importlib.util.find_spec("matplotlib") is None:
        say('no pictures: they need matplotlib, pip install "polyattn[plot]"')
        return
    write_png(loss_picture(*history, baseline, title), folder / "loss.png")
    write_png(attention_picture(weights, targets, title), folder / "attention.png")


def loss_picture(steps: Sequence[int], losses: Sequence[float], baseline: float, title: str) -> Figure:
    """Draw the training loss and the loss of predicting the mean, with the legend below the axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = plot.learning_curve(
        steps, losses, baseline=baseline, baseline_label="predicting the mean row", title=title, axes=figure.subplots()
    )
    axes.set_ylabel("mean squared error (log scale)")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


def attention_picture(weights: np.ndarray[Any, Any], targets: np.ndarray[Any, Any] | None, title: str) -> Figure:
    """Draw the weights (heads, queries, keys) of one sample, and mark the target key of each query."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    panels = plot.attention_map(weights, title=title, figure=figure)
    if targets is not None:
        rows, size = np.arange(len(targets)), max(2.0, min(11.0, 110.0 / len(targets)))
        style: dict[str, Any] = {"color": "#ff3b30", "fillstyle": "none", "markersize": size}
        for axes in panels.flat:
            if axes.get_visible():
                axes.plot(targets, rows, "o", label="the row to copy", **style)
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    return figure
