"""The mean squared error and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._operation import Operation, expect_arrays, expect_one_dtype, expect_shape
from ._range import product, unit_of

__all__ = ["MSELossGrads", "mse_loss", "mse_loss_backward", "mse_loss_forward"]


class MSELossGrads(NamedTuple):
    """The gradients of :func:`mse_loss`."""

    prediction: Array
    target: Array


def forward(backend: Backend, prediction: Array, target: Array) -> tuple[Array, tuple[Array, Array]]:
    """Return mean((prediction − target)²), the sum in float32 at least."""
    xp = backend.namespace()
    difference, scale = _difference(xp, prediction, target)
    unit = _unit(xp, difference)
    difference = difference / (scale * unit)
    loss = xp.sum(difference * difference) / math.prod(difference.shape)  # (), NaN of no elements
    return cast(xp, loss * unit * unit, prediction.dtype), (prediction, target)


def backward(backend: Backend, dy: Array, saved: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return ±2 (prediction − target) / count · dy."""
    xp = backend.namespace()
    difference, scale = _difference(xp, *saved)
    # loss = mean(difference²)
    share = xp.full_like(difference, 1 / max(math.prod(difference.shape), 1))
    ddifference = product(xp, difference, share, widen(xp, dy)) * (2.0 / scale)
    dprediction = cast(xp, ddifference, dy.dtype)
    return dprediction, -dprediction


def _difference(xp: Any, prediction: Array, target: Array) -> tuple[Array, Array]:
    """Return ``(prediction − target) · scale`` and ``scale``, a quarter where the difference might overflow, else 1."""
    prediction, target = widen(xp, prediction), widen(xp, target)
    one = xp.ones_like(prediction)
    scale = xp.where(xp.maximum(xp.abs(prediction), xp.abs(target)) > one, one * 0.25, one)
    return prediction * scale - target * scale, scale


def _unit(xp: Any, difference: Array) -> Array:
    """Return the largest magnitude where its square might overflow, else 1."""
    if 0 in difference.shape:
        return xp.sum(difference) + 1.0
    peak = xp.max(xp.abs(difference))
    one = xp.ones_like(peak)
    return xp.where(xp.greater(peak, one * 2.0**40), unit_of(xp, peak), one)


_operation = Operation("mse_loss", forward, backward)


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
    return _operation.call(_check(prediction, target))


def mse_loss_forward(prediction: Array, target: Array) -> tuple[Array, Cache]:
    """Return ``(mse_loss(prediction, target), cache)``."""
    return _operation.record(_check(prediction, target))


def mse_loss_backward(dy: Array, cache: Cache) -> MSELossGrads:
    """Return 2 (prediction − target) / N · dy for the prediction, and its negative for the target."""
    return _operation.pull(dy, cache, MSELossGrads)


def _check(prediction: Array, target: Array) -> dict[str, Array]:
    expect_arrays(prediction=prediction, target=target)
    expect_one_dtype(prediction=prediction, target=target)
    expect_shape("target", target, tuple(prediction.shape))
    return {"prediction": prediction, "target": target}
