"""The mean squared error and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._checks import expect_arrays, expect_one_dtype, expect_shape
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._range import unit_of

__all__ = ["MSELossGrads", "mse_loss", "mse_loss_backward", "mse_loss_forward"]


class MSELossGrads(NamedTuple):
    """The gradients of :func:`mse_loss`."""

    prediction: Array
    target: Array


class Saved(NamedTuple):
    """What the backward needs: the difference times ``scale``, and the largest magnitude of that."""

    difference: Array
    scale: Array
    peak: Array


def forward(backend: Backend, prediction: Array, target: Array) -> tuple[Array, Saved]:
    """Return mean((prediction − target)²), the sum in float32 at least."""
    xp = backend.namespace()
    prediction_, target_ = widen(xp, prediction), widen(xp, target)
    scale = _scale(xp, xp.maximum(_peak(xp, prediction_), _peak(xp, target_)))
    difference = prediction_ * scale - target_ * scale
    peak = _peak(xp, difference)
    unit = xp.where(xp.greater(peak, xp.full_like(peak, 2.0**40)), unit_of(xp, peak), xp.ones_like(peak))
    ratio = difference / unit
    loss = xp.sum(ratio * ratio) / math.prod(difference.shape)  # (), NaN of no elements
    unit = unit / scale
    return cast(xp, loss * unit * unit, prediction.dtype), Saved(difference, scale, peak)


def backward(backend: Backend, dy: Array, saved: Saved) -> MSELossGrads:
    """Return ±2 (prediction − target) / count · dy."""
    xp, (difference, scale, peak) = backend.namespace(), saved
    # loss = mean(difference²), divided by the count first where differences are large, and last where they are small
    one = xp.ones_like(peak)
    share, large = one / max(math.prod(difference.shape), 1), xp.greater(peak, one)
    first, last = xp.where(large, share, one), xp.where(large, one, share)
    ddifference = xp.multiply(xp.multiply(difference, first), widen(xp, dy))
    dprediction = cast(xp, xp.multiply(ddifference, last * 2.0 / scale), dy.dtype)
    return MSELossGrads(dprediction, -dprediction)


def _peak(xp: Any, x: Array) -> Array:
    """Return the largest magnitude, (); 0 of no elements."""
    return xp.sum(x) if 0 in x.shape else xp.maximum(xp.max(x), -xp.min(x))


def _scale(xp: Any, peak: Array) -> Array:
    """Return by what to multiply numbers so that their differences do not overflow: 1 where they do not anyway."""
    one = xp.ones_like(peak)
    return xp.where(xp.greater(peak, one * 2.0**100), one * 0.25, one)


OPERATION = Operation("mse_loss", forward, backward)


def mse_loss(prediction: Array, target: Array) -> Array:
    r"""Return the mean squared error over all elements, :math:`\frac1N \sum (p - t)^2`.

    Parameters
    ----------
    prediction, target : array
        Floating, of one shape and dtype.

    Returns
    -------
    array ()
        In the inputs' dtype; the sum is taken in float32 at least.

    Raises
    ------
    ShapeError, DTypeError
        If the shapes or the dtypes differ (nothing is broadcast), or are not floating.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> float(pa.functional.mse_loss(np.array([1.0, 3.0]), np.array([1.0, 1.0])))
    2.0
    """
    return run(OPERATION, _check(prediction, target))


def mse_loss_forward(prediction: Array, target: Array) -> tuple[Array, Cache]:
    """Return ``(mse_loss(prediction, target), cache)``."""
    return run_with_cache(OPERATION, _check(prediction, target))


def mse_loss_backward(dy: Array, cache: Cache) -> MSELossGrads:
    """Return 2 (prediction − target) / N · dy for the prediction, and its negative for the target."""
    return run_backward(OPERATION, dy, cache, MSELossGrads)


def _check(prediction: Array, target: Array) -> dict[str, Array]:
    expect_arrays(prediction=prediction, target=target)
    expect_one_dtype(prediction=prediction, target=target)
    expect_shape("target", target, tuple(prediction.shape))
    return {"prediction": prediction, "target": target}
