"""Layer normalisation and its backward."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._norms import by_rows, checked_norm, means_in_range, norm_gradient, normalised, root_in_range, trailing
from ._range import apply_linear

__all__ = ["LayerNormGrads", "layer_norm", "layer_norm_backward", "layer_norm_forward"]


class LayerNormGrads(NamedTuple):
    """The gradients of :func:`layer_norm`; None for an absent weight or bias."""

    x: Array
    weight: Array | None
    bias: Array | None


class Saved(NamedTuple):
    """What the backward needs."""

    xhat: Array
    root: Array
    weight: Array | None
    bias: Array | None
    axes: int


def forward(
    backend: Backend, x: Array, weight: Array | None, bias: Array | None, *, eps: float, axes: int = 1
) -> tuple[Array, Saved]:
    """Return x̂ · weight + bias with x̂ = (x − mean) / √(var + eps), all in float32 at least."""
    results = backend.operation("layer_norm", x, weight, bias, eps=eps, axes=axes)
    if results is not None:
        y, xhat, root = results
        return y, Saved(xhat, root, weight, bias, axes)
    xp, (_, last, n) = backend.namespace(), trailing(x, axes)

    def centred(x: Array) -> Array:
        # Twice: the first mean of a row far from zero has a rounding error, which the second pass subtracts.
        for _ in range(2):
            x = x - xp.sum(x, axis=last, keepdims=True) / n
        return x

    def formula(x: Array, *, scaled: bool = False) -> tuple[Array, Array, Array]:
        xhat, root = normalised(backend, widen(xp, x), centred, eps, last, n, scaled=scaled)
        y = xhat
        if weight is not None:
            y = y * widen(xp, weight)
        if bias is not None:
            y = y + widen(xp, bias)
        return cast(xp, y, x.dtype), xhat, root

    y, xhat, root = by_rows(backend, formula, functools.partial(root_in_range, xp, eps), x, axes=axes)
    return y, Saved(xhat, root, weight, bias, axes)


def backward(backend: Backend, dy: Array, saved: Saved) -> LayerNormGrads:
    """Return dx = (dx̂ − mean(dx̂) − x̂ · mean(dx̂ · x̂)) / √(var + eps), and the sums for weight and bias."""
    xp, (xhat, root, weight, bias, axes) = backend.namespace(), saved
    grads = backend.operation("layer_norm_backward", dy, xhat, root, weight, bias, axes=axes)
    if grads is not None:
        return LayerNormGrads(*grads)
    dy_, (rows, last, n) = widen(xp, dy), trailing(dy, axes)
    dweight = dbias = None
    # y = x̂ · weight + bias
    if bias is not None:
        dbias = cast(xp, apply_linear(backend, lambda dy: xp.sum(dy, axis=rows), dy_), bias.dtype)  # (*features)
    if weight is not None:
        dweight = apply_linear(backend, lambda dy: xp.sum(dy * xhat, axis=rows), dy_)
        dweight = cast(xp, dweight, weight.dtype)  # (*features)

    def formula(dy: Array, xhat: Array, root: Array, *, scaled: bool = False) -> tuple[Array, Array]:
        # x̂ = (x − mean(x)) / root(x)
        def means(dxhat: Array) -> tuple[Array, ...]:
            along = xp.sum(dxhat * xhat, axis=last, keepdims=True) / n
            return along, xp.sum(dxhat, axis=last, keepdims=True) / n

        def projected(dxhat: Array, along: Array, mean: Array) -> Array:
            return dxhat - mean - xhat * along

        return norm_gradient(backend, dy, root, weight, means, projected, last, scaled=scaled)

    dx, _ = by_rows(backend, formula, lambda dx, size: means_in_range(xp, size, root), dy, xhat, root, axes=axes)
    return LayerNormGrads(dx, dweight, dbias)


OPERATION = Operation("layer_norm", forward, backward)


def layer_norm(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float = 1e-5, axes: int = 1
) -> Array:
    r"""Normalise the last axis, or several, to mean 0 and variance 1, then scale and shift.

    .. math:: y = \frac{x - \mathrm{mean}(x)}{\sqrt{\mathrm{var}(x) + \epsilon}} \odot w + b

    Parameters
    ----------
    x : array (…, features…)
        Floating. Mean and (biased) variance are computed in float32 at least, and
        the mean is subtracted twice, so that rows far from zero are accurate.
    weight, bias : array (features…), optional
        Gain and shift, of the dtype of ``x``.
    eps : float
        Added to the variance, inside the root.
    axes : int
        The number of trailing axes that are normalised together, with lengths ``features``.
        It is the length of torch's ``normalized_shape``, and ONNX's ``axis`` is ``-axes``.

    Returns
    -------
    array
        Of the shape and dtype of ``x``.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If the shapes do not fit or ``x`` has fewer axes than ``axes``, the dtypes differ or are not
        floating, or ``eps`` is negative.

    Notes
    -----
    Ba, Kiros and Hinton, "Layer normalization" (2016).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.layer_norm(np.array([[1.0, 3.0]]), eps=0.0)
    array([[-1.,  1.]])
    """
    return run(OPERATION, *checked_norm(x, eps, axes, weight=weight, bias=bias))


def layer_norm_forward(
    x: Array, weight: Array | None = None, bias: Array | None = None, *, eps: float = 1e-5, axes: int = 1
) -> tuple[Array, Cache]:
    """Return ``(layer_norm(x, weight, bias), cache)``."""
    return run_with_cache(OPERATION, *checked_norm(x, eps, axes, weight=weight, bias=bias))


def layer_norm_backward(dy: Array, cache: Cache) -> LayerNormGrads:
    """Return the gradients of x, weight and bias, the latter two summed over every leading axis."""
    return run_backward(OPERATION, dy, cache, LayerNormGrads)
