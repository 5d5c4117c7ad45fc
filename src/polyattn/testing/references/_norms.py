"""Layer norm and root-mean-square norm over the last axes, each with its gradients."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ._functional import Float, f64


def _rows(x: ArrayLike, axes: int) -> Float:
    """Return x as rows, with its last axes flattened."""
    x = f64(x)
    return x.reshape(-1, int(np.prod(x.shape[x.ndim - axes :])))


def _gain(weight: ArrayLike | None) -> Float:
    return np.asarray(1.0 if weight is None else f64(weight).reshape(-1))


def _normalised(rows: Float, eps: float) -> tuple[Float, Float]:
    centred = rows - np.mean(rows, axis=1, keepdims=True)
    centred = centred - np.mean(centred, axis=1, keepdims=True)  # removes the rounding error of the first mean
    inverse = 1.0 / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + eps)
    return centred * inverse, inverse


def layer_norm(
    x: ArrayLike, weight: ArrayLike | None = None, bias: ArrayLike | None = None, eps: float = 1e-5, axes: int = 1
) -> Float:
    """Return (x − mean) / √(variance + eps) · weight + bias over the last axes, biased variance."""
    y, _ = _normalised(_rows(x, axes), eps)
    shift = 0.0 if bias is None else f64(bias).reshape(-1)
    return np.asarray(y * _gain(weight) + shift).reshape(np.shape(x))


def layer_norm_gradients(
    dy: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-5, axes: int = 1
) -> tuple[Float, Float, Float]:
    """Return the gradients of x, weight and bias."""
    shape, features = np.shape(x), np.shape(x)[np.ndim(x) - axes :]
    drows = _rows(dy, axes)
    normalised, inverse = _normalised(_rows(x, axes), eps)
    dnormalised = drows * _gain(weight)
    mean = np.mean(dnormalised, axis=1, keepdims=True)
    along = np.mean(dnormalised * normalised, axis=1, keepdims=True)
    dx = inverse * (dnormalised - mean - normalised * along)
    dweight, dbias = np.sum(drows * normalised, axis=0), np.sum(drows, axis=0)
    return dx.reshape(shape), dweight.reshape(features), dbias.reshape(features)


def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-5, axes: int = 1) -> Float:
    """Return x / √(mean of squares + eps) · weight over the last axes."""
    rows = _rows(x, axes)
    y = rows / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + eps)
    return np.asarray(y * _gain(weight)).reshape(np.shape(x))


def rms_norm_gradients(
    dy: ArrayLike, x: ArrayLike, weight: ArrayLike | None = None, eps: float = 1e-5, axes: int = 1
) -> tuple[Float, Float]:
    """Return the gradients of x and weight: a row of root r has the Jacobian (1 − x xᵀ / (n r²)) / r."""
    rows, drows, features = _rows(x, axes), _rows(dy, axes), np.shape(x)[np.ndim(x) - axes :]
    n, dx = rows.shape[1], np.zeros_like(rows)
    root = np.sqrt(np.mean(rows**2, axis=1) + eps)
    for i, row in enumerate(rows):
        jacobian = (np.eye(n) - np.outer(row, row) / (n * root[i] ** 2)) / root[i]
        dx[i] = jacobian @ (drows[i] * _gain(weight))
    dweight = np.sum(drows * rows / root[:, None], axis=0)
    return dx.reshape(np.shape(x)), dweight.reshape(features)
