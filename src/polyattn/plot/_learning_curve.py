"""The loss over the steps of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeError
from ._axes import drawable, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["learning_curve"]


def learning_curve(
    steps: Sequence[int],
    losses: Sequence[float],
    *,
    baseline: float | None = None,
    baseline_label: str = "baseline",
    axes: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the loss of each step on a logarithmic axis, and the running median if there are many steps.

    Parameters
    ----------
    steps, losses : sequences of the same length
        The steps, and the loss of each.
    baseline : float, optional
        A positive loss to compare with, that of predicting the mean for instance.
    baseline_label : str
        The label of the baseline.
    axes : matplotlib Axes, optional
        Where to draw; by default in a new figure.
    title : str, optional

    Returns
    -------
    Axes
        With labelled lines but without a legend.

    Raises
    ------
    ShapeError
        If there are no steps, or the numbers of steps and losses differ.
    BackendUnavailableError
        If matplotlib is missing.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from polyattn import plot
    >>> axes = plot.learning_curve(range(4), [2.0, 1.0, 0.5, 0.3], baseline=1.5, axes=Figure().subplots())
    >>> axes.get_yscale(), len(axes.get_lines())
    ('log', 2)
    """
    if not len(steps) or len(steps) != len(losses):
        raise ShapeError(f"steps, losses: expected as many of one as of the other, got {len(steps)} and {len(losses)}")
    axes = drawable(axes, (8, 4.5))
    from matplotlib.ticker import MaxNLocator

    window = max(1, len(losses) // 50)
    marker = "o" if len(losses) == 1 else None  # a line needs two points
    axes.plot(steps, losses, color="#9ec5e8", linewidth=0.8, marker=marker, label="loss of each step")
    if window > 1:
        middles = steps[window // 2 : window // 2 + len(losses) - window + 1]
        label = f"median of {window} steps"
        axes.plot(middles, _running_median(losses, window), color="#0b5394", linewidth=2, label=label)
    if baseline is not None and baseline > 0:
        label = f"{baseline_label}: {baseline:.3g}"
        axes.axhline(baseline, color="#444444", linestyle="--", linewidth=1.2, label=label)
    axes.set(yscale="log", xlabel="training step", ylabel="loss (log scale)", title=title or "")
    axes.margins(x=0.01)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    plain(axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return axes


def _running_median(values: Sequence[float], window: int) -> np.ndarray[Any, Any]:
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(values), window)
    return np.asarray(np.median(windows, axis=-1))
