"""Layer normalisation and its backward."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError
from ..kernels import cast, widen
from ._operation import Operation, expect_one_dtype, expect_rank, expect_shape, is_number, shown

__all__ = ["LayerNormGrads", "layer_norm", "layer_norm_backward", "layer_norm_forward"]


class LayerNormGrads(NamedTuple):
    """The gradients of :func:`layer_norm`; None for an absent weight or bias."""

    x: Array
    weight: Array | None
    bias: Array | None


def forward(
    backend: Backend, x: Array, weight: Array | None, bias: Array | None, *, eps: float
) -> tuple[Array, tuple[Array | None, ...]]:
    """Return x̂ · weight + bias with x̂ = (x − mean) / √(var + eps), all in float32 at least."""
    xp = backend.namespace()
    centred, n = widen(xp, x), max(x.shape[-1], 1)  # the mean of no features is not asked for
    # Twice: the mean of a row far from zero is rounded, and the second pass takes that error out again.
    for _ in range(2):
        centred = centred - xp.sum(centred, axis=-1, keepdims=True) / n
    rstd = 1 / xp.sqrt(xp.sum(centred * centred, axis=-1, keepdims=True) / n + eps)  # (…, 1)
    xhat = centred * rstd
    y = xhat
    if weight is not None:
        y = y * widen(xp, weight)
    if bias is not None:
        y = y + widen(xp, bias)
    return cast(xp, y, x.dtype), (xhat, rstd, weight, bias)


def backward(
    backend: Backend, dy: Array, saved: tuple[Array | None, ...], *, eps: float
) -> tuple[Array, Array | None, Array | None]:
    """Return dx = (dx̂ − mean(dx̂) − x̂ · mean(dx̂ · x̂)) / √(var + eps), and the sums for weight and bias."""
    xp, (xhat, rstd, weight, bias) = backend.namespace(), saved
    dy_, rows, n = widen(xp, dy), tuple(range(dy.ndim - 1)), max(dy.shape[-1], 1)
    # y = x̂ · weight + bias
    dbias = None if bias is None else cast(xp, xp.sum(dy_, axis=rows), bias.dtype)  # (n,)
    dweight = None if weight is None else cast(xp, xp.sum(dy_ * xhat, axis=rows), weight.dtype)  # (n,)
    dxhat = dy_ if weight is None else dy_ * widen(xp, weight)
    # x̂ = (x − mean(x)) · rstd(x)
    along = xp.sum(dxhat * xhat, axis=-1, keepdims=True) / n
    dx = (dxhat - xp.sum(dxhat, axis=-1, keepdims=True) / n - xhat * along) * rstd
    return cast(xp, dx, dy.dtype), dweight, dbias


_operation = Operation("layer_norm", forward, backward)


def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float = 1e-5) -> Array:
    r"""Normalise the last axis to mean 0 and variance 1, then scale and shift.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \odot w + b

    Parameters
    ----------
    x : array (…, features)
        Floating. The statistics are taken in float32 at least, with the biased
        variance, and re-centred: rows far from zero come out right.
    weight, bias : array (features,), optional
        Gain and shift, of the dtype of ``x``.
    eps : float
        Added to the variance, inside the root.

    Returns
    -------
    array
        Of the shape and dtype of ``x``.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If the shapes do not fit, the dtypes differ or are not floating, or ``eps`` is negative.

    Notes
    -----
    Ba, Kiros and Hinton, "Layer normalization" (2016).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.layer_norm(np.array([[1.0, 3.0]]), eps=0.0)
    array([[-1.,  1.]])
    """
    return _operation.call(*_check(x, weight, bias, eps))


def layer_norm_forward(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float = 1e-5
) -> tuple[Array, Cache]:
    """Return ``(layer_norm(x, weight, bias), cache)``."""
    return _operation.record(*_check(x, weight, bias, eps))


def layer_norm_backward(dy: Array, cache: Cache) -> LayerNormGrads:
    """Return the gradients of x, weight and bias, the latter two summed over every leading axis."""
    return _operation.pull(dy, cache, LayerNormGrads)


def _check(
    x: Array, weight: Array | None, bias: Array | None, eps: float
) -> tuple[dict[str, Array | None], dict[str, float]]:
    expect_one_dtype(x=x, weight=weight, bias=bias)
    expect_rank("x", x, 1)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            expect_shape(name, parameter, (x.shape[-1],))
    if not is_number(eps) or not eps >= 0:
        raise ArgumentError(f"eps: expected a number that is not negative, got {shown(eps)}")
    return {"x": x, "weight": weight, "bias": bias}, {"eps": float(eps)}
