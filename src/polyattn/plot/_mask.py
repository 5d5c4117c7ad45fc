"""A plot of the keys to which each query may attend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeError
from ..functional import attention_weights
from ._axes import drawable, label_positions, on_host

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["mask"]

COLOURS = ("#f2f2f2", "#0072B2")  # excluded, allowed
GRID = 40  # the most positions with grid lines between them


def mask(n_q: int, n_k: int, *, axes: Axes | None = None, title: str | None = None, **arguments: Any) -> Axes:
    """Draw the keys to which each query may attend.

    Parameters
    ----------
    n_q, n_k : int
        The numbers of queries and keys.
    axes : matplotlib Axes, optional
        Where to draw; by default in a new figure.
    title : str, optional
        By default the fraction of allowed pairs.
    **arguments
        Arguments of :func:`polyattn.attention` that exclude keys: mask, bias, causal, q_offset, window, key_lengths,
        segment_ids, without axes for heads or a batch.

    Returns
    -------
    Axes

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        As :func:`polyattn.attention`, and if an argument has an axis for heads or a batch.
    BackendUnavailableError
        If matplotlib is missing.

    Examples
    --------
    >>> from matplotlib.figure import Figure
    >>> from polyattn import plot
    >>> axes = plot.mask(6, 8, causal=True, window=(3, None), axes=Figure().subplots())
    >>> axes.get_title()
    '23 of 48 pairs may attend (48%)'
    """
    allowed = _allowed(n_q, n_k, arguments)
    axes = drawable(axes, (5.6, 5.2))
    from matplotlib.colors import ListedColormap

    axes.imshow(allowed, cmap=ListedColormap(list(COLOURS)), vmin=0, vmax=1, interpolation="nearest", aspect="auto")
    label_positions(axes, n_q, n_k)
    if max(n_q, n_k) <= GRID:
        axes.set_xticks(np.arange(n_k + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(n_q + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.0)
        axes.tick_params(which="minor", length=0)
    count = int(allowed.sum())
    axes.set_title(title or f"{count} of {allowed.size} pairs may attend ({count / allowed.size:.0%})")
    return axes


def _allowed(n_q: int, n_k: int, arguments: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return the allowed pairs, by attention with equal scores: the weight of a pair is positive if it is allowed."""
    if n_q < 1 or n_k < 1:
        raise ShapeError(f"n_q, n_k: expected 1 or more, got {n_q} and {n_k}")
    host = {name: on_host_or_plain(x) for name, x in arguments.items()}
    if (bias := host.get("bias")) is not None:
        host["bias"] = np.where(np.isneginf(bias), -np.inf, 0.0)
    return np.asarray(attention_weights(np.zeros((n_q, 1)), np.zeros((n_k, 1)), backend="numpy", **host) > 0)


def on_host_or_plain(x: Any) -> Any:
    """Convert arrays, and pairs of arrays, to NumPy; return everything else unchanged."""
    if isinstance(x, tuple) and any(hasattr(part, "shape") for part in x):
        return tuple(map(on_host_or_plain, x))
    if not getattr(x, "shape", ()):
        return x
    host = on_host(x)
    return host if host.dtype == bool or "float" in str(x.dtype) else host.astype(np.int64)
