"""Attention weights as an image for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeError
from ..kernels import Array
from ._axes import expect_matplotlib, label_positions, on_host

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["attention_map"]

MOST_HEADS, COLUMNS = 16, 4


def attention_map(
    weights: Array,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    title: str | None = None,
    figure: Figure | None = None,
) -> np.ndarray[Any, Any]:
    """Draw attention weights, a panel for each head, all on the same colour scale.

    Parameters
    ----------
    weights : array (H, n_q, n_k) or (n_q, n_k)
        Of any library; the result of :func:`polyattn.attention_weights` for one entry of a batch.
    queries, keys : sequence of str, optional
        Labels of the positions; drawn if there are at most 48.
    title : str, optional
        The title of the figure.
    figure : matplotlib Figure, optional
        An empty figure to draw into, which is resized; by default a new one.

    Returns
    -------
    array of Axes, (rows, columns)
        One for each of the first 16 heads. Axes after the last head are invisible.

    Raises
    ------
    ShapeError
        If ``weights`` does not have two or three axes, or the number of labels differs from that of positions.
    BackendUnavailableError
        If matplotlib is missing.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> from matplotlib.figure import Figure
    >>> from polyattn import plot
    >>> q = np.random.default_rng(0).standard_normal((2, 5, 4))
    >>> weights = pa.attention_weights(q, q, causal=True)
    >>> plot.attention_map(weights, title="two heads", figure=Figure()).shape
    (1, 2)
    """
    expect_matplotlib()
    host = _checked(weights, queries, keys)
    shown = host[:MOST_HEADS]
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    panels = _panels(figure, rows, columns)
    largest = float(shown.max(initial=0.0))
    for head, axes in enumerate(panels.flat):
        if head >= len(shown):
            axes.set_visible(False)
            continue
        image = axes.imshow(
            shown[head], vmin=0.0, vmax=largest or 1.0, cmap="viridis", interpolation="nearest", aspect="auto"
        )
        axes.set_title(f"head {head}" if len(host) > 1 else "attention weights")
        label_positions(axes, queries or shown.shape[1], keys or shown.shape[2])
    more = f"the first {MOST_HEADS} of {len(host)} heads" if len(host) > MOST_HEADS else ""
    whole = panels.flat[0].figure
    whole.suptitle(", ".join(part for part in (title, more) if part))
    whole.colorbar(image, ax=panels.ravel().tolist(), label="attention weight", shrink=0.9)
    return panels


def _checked(weights: Array, queries: Sequence[str] | None, keys: Sequence[str] | None) -> np.ndarray[Any, Any]:
    """Return the weights as (H, n_q, n_k)."""
    host = on_host(weights)
    if host.ndim not in (2, 3) or 0 in host.shape:
        raise ShapeError(f"weights: expected (H, n_q, n_k) or (n_q, n_k), none of them 0, got {host.shape}")
    host = host[None] if host.ndim == 2 else host
    for name, words, length in (("queries", queries, host.shape[1]), ("keys", keys, host.shape[2])):
        if words is not None and len(words) != length:
            raise ShapeError(f"{name}: expected {length} words, one for each position, got {len(words)}")
    return host


def _panels(figure: Figure | None, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Return a grid of Axes in a figure, and set its size."""
    if figure is None:
        from matplotlib import pyplot

        figure = pyplot.figure(layout="constrained")
    figure.set_size_inches(max(3.6 * columns + 1.6, 6.4), 3.5 * rows + 1.2)
    return np.asarray(figure.subplots(rows, columns, squeeze=False))
