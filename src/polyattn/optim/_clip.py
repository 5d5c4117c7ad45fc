"""Clipping of gradients by their common norm."""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..kernels import Array, wide, widen
from ._base import Arrays, as_array, check_floating, common_namespace, widest_dtype


def clip_by_global_norm(grads: Arrays, max_norm: float) -> tuple[dict[str, Array], Array]:
    """Scale all gradients by one factor so that their common norm is at most ``max_norm``.

    ``norm = √(Σ g²)`` over every element of every array, and ``g · min(1, max_norm / norm)``.

    Parameters
    ----------
    grads : dict
        Gradients by name, of floating dtypes.
    max_norm : float
        More than 0; infinity only measures.

    Returns
    -------
    grads : dict
        New arrays in the gradients' own dtypes. If the norm is not finite every element is NaN: a factor of
        ``max_norm / inf = 0`` would hide the overflow.
    norm : array
        The norm before clipping, a 0-d array of float64 if a gradient is float64, else of float32.

    Raises
    ------
    ArgumentError
        If ``max_norm`` is not a number above 0.
    DTypeError
        If a gradient is not a floating array.
    BackendMismatchError
        If the gradients are of several libraries or devices.
    CheckpointError
        If ``grads`` is no dict, or there are no gradients.

    References
    ----------
    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013.

    Examples
    --------
    >>> import numpy as np
    >>> grads, norm = clip_by_global_norm({"weight": np.asarray([3.0]), "bias": np.asarray([4.0])}, 1.0)
    >>> float(norm), grads["weight"], grads["bias"]
    (5.0, array([0.6]), array([0.8]))
    """
    if not isinstance(max_norm, numbers.Real) or isinstance(max_norm, bool) or not max_norm > 0:
        raise ArgumentError(f"max_norm: expected a number above 0, got {max_norm!r}")
    xp, home = common_namespace(grads=grads)
    check_floating("grads", grads)
    widest = widest_dtype(xp, grads)
    with np.errstate(all="ignore"):  # as in the operations: what is not finite stays so, without a warning
        max_norm = float(max_norm)
        norm = _global_norm(list(grads.values()), xp, widest, home)
        one = xp.ones_like(norm)
        scale = one
        if max_norm < math.inf:
            over = xp.greater(norm, one * max_norm)
            scale = xp.where(over, max_norm / xp.where(over, norm, one), one)
        scale = xp.where(xp.isfinite(norm), scale, one * math.nan)
        clipped = {}
        for name, grad in grads.items():
            scaled = widen(xp, grad) * xp.astype(scale, wide(xp, grad.dtype), copy=False)
            clipped[name] = as_array(xp.astype(scaled, grad.dtype, copy=False), xp)
    return clipped, as_array(norm, xp)


def _global_norm(grads: list[Array], xp: Any, dtype: Any, home: Any) -> Array:
    """Return the norm, taken in units of the largest element so that no square overflows."""
    wide = [xp.astype(grad, dtype, copy=False) for grad in grads if 0 not in grad.shape]
    zero = xp.zeros((), dtype=dtype, device=home)
    peak = functools.reduce(xp.maximum, (xp.max(xp.abs(grad)) for grad in wide), zero)
    usable = xp.logical_and(xp.greater(peak, zero), xp.isfinite(peak))
    unit = xp.where(usable, peak, xp.ones_like(peak))
    squares = (xp.sum(xp.square(grad / unit)) for grad in wide)
    return unit * xp.sqrt(functools.reduce(xp.add, squares, zero))
