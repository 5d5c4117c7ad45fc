"""The two pictures of a run. Without matplotlib there are none, and nothing else changes."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoint import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["attention_picture", "draw_pictures", "loss_picture", "target_positions"]

MOST_HEADS, COLUMNS = 16, 4
MARK = "#ff3b30"


def draw_pictures(
    folder: Path,
    history: tuple[Sequence[int], Sequence[float]],
    baseline: float,
    weights: np.ndarray[Any, Any],
    targets: np.ndarray[Any, Any] | None,
    title: str,
    say: Callable[[str], None],
) -> None:
    """Write ``loss.png`` and ``attention.png``, or say in one line what is missing for it.

    Parameters
    ----------
    folder : Path
        Where to.
    history : (steps, losses)
        The training loss.
    baseline : float
        The loss of predicting the mean.
    weights : array
        Attention weights of one sample, ``(heads, queries, keys)``.
    targets : array or None
        For each query the key that it should find.
    title : str
        What was trained, in a few words.
    say : callable
        Prints a line.
    """
    if importlib.util.find_spec("matplotlib") is None:
        say('no pictures: they need matplotlib, pip install "polyattn[plot]"')
        return
    write_bytes(folder / "loss.png", _png(loss_picture(*history, baseline, title)))
    write_bytes(folder / "attention.png", _png(attention_picture(weights, targets, title)))


def loss_picture(steps: Sequence[int], losses: Sequence[float], baseline: float, title: str) -> Figure:
    """Draw the training loss, each step's and its running median, over the steps."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    window = max(1, len(losses) // 50)
    marker = "o" if len(losses) == 1 else None  # a line needs two points
    axes.plot(steps, losses, color="#9ec5e8", linewidth=0.8, marker=marker, label="loss of each step")
    if window > 1:
        label = f"median of {window} steps"
        middles = steps[window // 2 : window // 2 + len(losses) - window + 1]
        axes.plot(middles, _running_median(losses, window), color="#0b5394", linewidth=2, label=label)
    if baseline > 0:
        label = f"predicting the mean row: {baseline:.3g}"
        axes.axhline(baseline, color="#444444", linestyle="--", linewidth=1.2, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("training step")
    axes.set_ylabel("mean squared error (log scale)")
    axes.set_title(title)
    axes.margins(x=0.01)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.legend(loc="outside lower center", ncols=3, frameon=False)  # beside the curves, never over them
    return figure


def attention_picture(weights: np.ndarray[Any, Any], targets: np.ndarray[Any, Any] | None, title: str) -> Figure:
    """Draw the weights of one sample, a panel a head, and mark the key that each query should find."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = weights[:MOST_HEADS]
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(max(3.6 * columns + 1.6, 6.4), 3.5 * rows + 1.2), layout=layout)
    panels = figure.subplots(rows, columns, squeeze=False)
    for head, axes in enumerate(panels.flat):
        if head >= len(shown):
            axes.set_visible(False)
            continue
        image = axes.imshow(
            shown[head], vmin=0.0, vmax=shown.max(), cmap="viridis", interpolation="nearest", aspect="auto"
        )
        axes.set_title(f"head {head}")
        axes.set_xlabel("key position")
        axes.set_ylabel("query position")
        axes.set_xticks(_ticks(shown.shape[2]))
        axes.set_yticks(_ticks(shown.shape[1]))
        if targets is not None:
            _mark(axes, targets)
    more = f", the first {MOST_HEADS} of {len(weights)} heads" if len(weights) > MOST_HEADS else ""
    figure.suptitle(title + more)
    figure.colorbar(image, ax=panels.ravel().tolist(), label="attention weight", shrink=0.9)
    if targets is not None:
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", frameon=False)
    return figure


def target_positions(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return for each row of ``y`` its position in ``x``, both ``(sequence, width)``; None if a row is not there."""
    equal = np.all(x[None, :, :] == y[:, None, :], axis=-1)  # (queries, keys)
    return np.argmax(equal, axis=-1) if bool(np.all(np.any(equal, axis=-1))) else None


def _mark(axes: Axes, targets: np.ndarray[Any, Any]) -> None:
    size = max(2.0, min(11.0, 110.0 / len(targets)))
    rows = np.arange(len(targets))
    axes.plot(targets, rows, "o", color=MARK, fillstyle="none", markersize=size, label="the row to copy")


def _ticks(length: int) -> range:
    return range(0, length, max(1, length // 8))


def _running_median(values: Sequence[float], window: int) -> np.ndarray[Any, Any]:
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values), window)
    return np.asarray(np.median(windows, axis=-1))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
