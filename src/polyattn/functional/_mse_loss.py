"""The mean squared error and its backward."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._checks import expect_arrays, expect_one_dtype, expect_shape
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._range import choose, product, unit_of

__all__ = ["MSELossGrads", "mse_loss", "mse_loss_backward", "mse_loss_forward"]


class MSELossGrads(NamedTuple):
    """The gradients of :func:`mse_loss`."""

    prediction: Array
    target: Array


class Saved(NamedTuple):
    """What the backward needs: the difference divided by ``unit``, (), which is 1 unless the squares overflow."""

    difference: Array
    unit: Array


def forward(backend: Backend, prediction: Array, target: Array) -> tuple[Array, Saved]:
    """Return mean((prediction − target)²), the sum in float32 at least."""
    xp = backend.namespace()
    prediction_, target_ = widen(xp, prediction), widen(xp, target)

    def plain() -> tuple[tuple[Array, Array, Array], Array]:
        difference = prediction_ - target_
        loss = xp.sum(difference * difference) / math.prod(difference.shape)  # (), NaN of no elements
        return (loss, difference, xp.ones_like(loss)), xp.isfinite(loss)

    def scaled() -> tuple[Array, Array, Array]:
        difference = prediction_ / 4 - target_ / 4
        peak = xp.max(xp.abs(difference)) if math.prod(difference.shape) else xp.sum(difference)
        # The unit is at least 1, so that no small difference is scaled to 0.
        unit = xp.where(xp.greater(peak, xp.ones_like(peak)), unit_of(xp, peak), xp.ones_like(peak))
        ratio = difference / unit
        return xp.sum(ratio * ratio) / math.prod(ratio.shape) * unit * 4 * unit * 4, difference, xp.full_like(peak, 4)

    loss, difference, unit = choose(backend, prediction, plain, scaled)
    return cast(xp, loss, prediction.dtype), Saved(difference, unit)


def backward(backend: Backend, dy: Array, saved: Saved) -> MSELossGrads:
    """Return ±2 (prediction − target) / count · dy."""
    xp, (difference, unit) = backend.namespace(), saved
    # loss = mean(difference²)
    share, dloss = unit * (2 / max(math.prod(difference.shape), 1)), widen(xp, dy)
    if backend.state(dy).readable:  # the fewest passes over the difference
        dprediction = product(xp, share, dloss, difference)
    else:  # a trace stays linear in dy, since JAX transposes backwards
        dprediction = product(xp, xp.broadcast_to(share, difference.shape), difference, dloss)
    dprediction = cast(xp, dprediction, dy.dtype)
    return MSELossGrads(dprediction, -dprediction)


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
        In the inputs' dtype; the sum is computed in float32 at least.

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
