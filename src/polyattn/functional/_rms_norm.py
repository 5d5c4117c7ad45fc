"""Normalisation by the root mean square, and its backward."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._norms import (
    by_rows,
    checked_norm,
    inverse_in_range,
    means_in_range,
    norm_gradient,
    normalised,
    quotient,
    root_in_range,
    trailing,
)
from ._range import apply_linear, choose

__all__ = ["RMSNormGrads", "rms_norm", "rms_norm_backward", "rms_norm_forward"]


class RMSNormGrads(NamedTuple):
    """The gradients of :func:`rms_norm`; None for an absent weight."""

    x: Array
    weight: Array | None


class Saved(NamedTuple):
    """What the backward needs."""

    x: Array
    root: Array
    weight: Array | None
    axes: int


def forward(backend: Backend, x: Array, weight: Array | None, *, eps: float, axes: int = 1) -> tuple[Array, Saved]:
    """Return x̂ · weight with x̂ = x / √(mean(x²) + eps), all in float32 at least."""
    results = backend.operation("rms_norm", x, weight, eps=eps, axes=axes)
    if results is not None:
        y, root = results
        return y, Saved(x, root, weight, axes)
    xp, (_, last, n) = backend.namespace(), trailing(x, axes)

    def formula(x: Array, *, scaled: bool = False) -> tuple[Array, Array]:
        y, root = normalised(backend, widen(xp, x), lambda x: x, eps, last, n, scaled=scaled)
        if weight is not None:
            y = y * widen(xp, weight)
        return cast(xp, y, x.dtype), root

    y, root = by_rows(backend, formula, functools.partial(root_in_range, xp, eps), x, axes=axes)
    return y, Saved(x, root, weight, axes)


def backward(backend: Backend, dy: Array, saved: Saved) -> RMSNormGrads:
    """Return dx = (dx̂ − x̂ · mean(dx̂ · x̂)) / √(mean(x²) + eps), and the sum for weight."""
    xp, (x, root, weight, axes) = backend.namespace(), saved
    grads = backend.operation("rms_norm_backward", dy, x, root, weight, axes=axes)
    if grads is not None:
        return RMSNormGrads(*grads)
    rows, last, n = trailing(dy, axes)
    # y = x̂ · weight
    dweight = None
    if weight is not None:

        def gain(dy: Array) -> Array:
            xhat = choose(
                backend, root, lambda: (widen(xp, x) / root, inverse_in_range(xp, root)),
                lambda: quotient(backend, widen(xp, x), root, scaled=True),
            )  # fmt: skip
            return xp.sum(dy * xhat, axis=rows)

        dweight = cast(xp, apply_linear(backend, gain, widen(xp, dy)), weight.dtype)  # (*features)

    def formula(dy: Array, x: Array, root: Array, *, scaled: bool = False) -> tuple[Array, Array]:
        xhat = quotient(backend, widen(xp, x), root, scaled=scaled)

        # x̂ = x / root(x)
        def means(dxhat: Array) -> tuple[Array, ...]:
            return (xp.sum(dxhat * xhat, axis=last, keepdims=True) / n,)

        def projected(dxhat: Array, along: Array) -> Array:
            return dxhat - xhat * along

        return norm_gradient(backend, dy, root, weight, means, projected, last, scaled=scaled)

    dx, _ = by_rows(backend, formula, lambda dx, size: means_in_range(xp, size, root), dy, x, root, axes=axes)
    return RMSNormGrads(dx, dweight)


OPERATION = Operation("rms_norm", forward, backward)


def rms_norm(x: Array, weight: Array | None = None, *, eps: float = 1e-5, axes: int = 1) -> Array:
    r"""Divide the last axis, or several, by the root of its mean square, then scale.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \odot w

    Parameters
    ----------
    x : array (…, features…)
        Floating. The mean is computed in float32 at least.
    weight : array (features…), optional
        Gain, of the dtype of ``x``.
    eps : float
        Added to the mean square, inside the root. (torch's default is the machine epsilon.)
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
    Zhang and Sennrich, "Root mean square layer normalization" (2019).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.rms_norm(np.array([[1.0, 7.0]]), eps=0.0)
    array([[0.2, 1.4]])
    """
    return run(OPERATION, *checked_norm(x, eps, axes, weight=weight))


def rms_norm_forward(x: Array, weight: Array | None = None, *, eps: float = 1e-5, axes: int = 1) -> tuple[Array, Cache]:
    """Return ``(rms_norm(x, weight), cache)``."""
    return run_with_cache(OPERATION, *checked_norm(x, eps, axes, weight=weight))


def rms_norm_backward(dy: Array, cache: Cache) -> RMSNormGrads:
    """Return the gradients of x and weight, the latter summed over every leading axis."""
    return run_backward(OPERATION, dy, cache, RMSNormGrads)
