"""Clipping of gradients by their global norm."""

from __future__ import annotations

import functools
import math
from typing import Any

from ..backend import silenced
from ..errors import ArgumentError
from ..functional._checks import expect_floating, is_number
from ..functional._range import unit_of
from ..kernels import Array, cast
from ._base import Arrays, as_array, common_place, labelled, widest_dtype


def clip_by_global_norm(grads: Arrays, max_norm: float) -> tuple[dict[str, Array], Array]:
    """Scale all gradients by the same factor so that their global norm is at most ``max_norm``.

    ``norm = √(Σ g²)`` over all elements of all arrays; the result is ``g · min(1, max_norm / norm)``.

    Parameters
    ----------
    grads : dict
        Gradients by name, of floating dtypes.
    max_norm : float
        More than 0. Infinity computes the norm without clipping.

    Returns
    -------
    grads : dict
        New arrays with the gradients' dtypes. If an element is not finite, all elements are NaN: a factor
        ``max_norm / inf = 0`` would hide the overflow.
    norm : array
        The norm before clipping, a 0-d array of float64 if a gradient is float64, else of float32. It may
        overflow to infinity for finite gradients, which are still clipped correctly.

    Raises
    ------
    ArgumentError
        If ``max_norm`` is not a number above 0.
    DTypeError
        If a gradient is not a floating array.
    BackendMismatchError
        If the gradients are of several libraries or devices.
    CheckpointError
        If ``grads`` is no dict or is empty.

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
    if not is_number(max_norm) or not max_norm > 0:
        raise ArgumentError(f"max_norm: expected a number above 0, got {max_norm!r}")
    backend, device = common_place(grads=grads)
    expect_floating(**labelled(grads=grads))
    xp, max_norm = backend.namespace(), float(max_norm)
    with silenced():  # as in the operations, inf and NaN give no warning
        unit, length = _norm(list(grads.values()), xp, widest_dtype(xp, grads), device)
        norm = unit * length
        one = xp.ones_like(norm)
        over = xp.greater(norm, one * max_norm)
        # g · max_norm / norm, in an order in which nothing overflows or underflows
        factor, unit = xp.where(over, one * max_norm / length, one), xp.where(over, unit, one)
        factor = xp.where(xp.isfinite(length), factor, xp.full_like(factor, math.nan))
        clipped = {name: _scaled(grad, unit, factor, xp) for name, grad in grads.items()}
    return clipped, as_array(norm, xp)


def _scaled(grad: Array, unit: Array, factor: Array, xp: Any) -> Array:
    """Return ``grad / unit · factor`` in the dtype of the gradient."""
    scaled = xp.multiply(xp.divide(cast(xp, grad, unit.dtype), unit), factor)
    return as_array(cast(xp, scaled, grad.dtype), xp)


def _norm(grads: list[Array], xp: Any, dtype: Any, device: Any) -> tuple[Array, Array]:
    """Return a unit close to the largest magnitude, and the norm divided by it, finite if all elements are."""
    grads = [cast(xp, grad, dtype) for grad in grads if 0 not in grad.shape]
    zero = xp.zeros((), dtype=dtype, device=device)
    peak = functools.reduce(xp.maximum, (xp.max(xp.abs(grad)) for grad in grads), zero)
    unit = unit_of(xp, peak)
    squares = (xp.sum(xp.square(grad / unit)) for grad in grads)
    return unit, xp.sqrt(functools.reduce(xp.add, squares, zero))
