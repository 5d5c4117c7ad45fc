"""Softmax, linear, embedding and losses, each with its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]


def f64(x: ArrayLike) -> Float:
    """Return a float64 copy of ``x``."""
    return np.array(x, dtype=np.float64)


def softmax(x: ArrayLike, axis: int = -1) -> Float:
    """Return exp(x) / Σ exp(x) along ``axis``; zeros if all elements are −inf."""
    x = f64(x)
    if x.size == 0:
        return x
    peak = np.max(x, axis=axis, keepdims=True)
    powers = np.exp(x - np.where(np.isneginf(peak), 0.0, peak))
    total = np.sum(powers, axis=axis, keepdims=True)
    return np.asarray(powers / np.where(total == 0, 1.0, total))


def softmax_gradient(dy: ArrayLike, x: ArrayLike, axis: int = -1) -> Float:
    """Return y (dy − Σ dy y): the Jacobian diag(y) − y yᵀ times ``dy``."""
    y, dy = softmax(x, axis), f64(dy)
    return np.asarray(y * (dy - np.sum(dy * y, axis=axis, keepdims=True)))


def log_softmax(x: ArrayLike, axis: int = -1) -> Float:
    """Return x − log Σ exp(x) along ``axis``."""
    x = f64(x)
    if x.size == 0:
        return x
    peak = np.max(x, axis=axis, keepdims=True)
    return np.asarray(x - peak - np.log(np.sum(np.exp(x - peak), axis=axis, keepdims=True)))


def log_softmax_gradient(dy: ArrayLike, x: ArrayLike, axis: int = -1) -> Float:
    """Return dy − softmax(x) Σ dy: the transpose of the Jacobian 1 − 1 pᵀ times ``dy``."""
    return np.asarray(f64(dy) - softmax(x, axis) * np.sum(f64(dy), axis=axis, keepdims=True))


def embedding(indices: ArrayLike, weight: ArrayLike) -> Float:
    """Return the rows of ``weight`` at the indices."""
    weight, indices = f64(weight), np.asarray(indices)
    y = np.zeros((*indices.shape, weight.shape[1]))
    for place in np.ndindex(indices.shape):
        y[place] = weight[indices[place]]
    return y


def embedding_gradient(dy: ArrayLike, indices: ArrayLike, weight: ArrayLike) -> Float:
    """Return the gradient of ``weight``: dy added to the row at each index, one at a time."""
    dy, dweight, indices = f64(dy), np.zeros(np.shape(weight)), np.asarray(indices)
    for place in np.ndindex(indices.shape):
        dweight[indices[place]] += dy[place]
    return dweight


def linear(x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None) -> Float:
    """Return x W + b."""
    y = f64(x) @ f64(weight)
    return y if bias is None else y + f64(bias)


def linear_gradients(dy: ArrayLike, x: ArrayLike, weight: ArrayLike) -> tuple[Float, Float, Float]:
    """Return the gradients of x, weight and bias; those of weight and bias are summed over all rows."""
    dy, x, weight = f64(dy), f64(x), f64(weight)
    rows, drows = x.reshape(-1, weight.shape[0]), dy.reshape(-1, weight.shape[1])
    return np.einsum("...o,io->...i", dy, weight), np.einsum("ri,ro->io", rows, drows), np.sum(drows, axis=0)


def mse_loss(prediction: ArrayLike, target: ArrayLike) -> Float:
    """Return the mean of (prediction − target)² over all elements."""
    return np.asarray(np.mean((f64(prediction) - f64(target)) ** 2))


def mse_loss_gradients(dy: ArrayLike, prediction: ArrayLike, target: ArrayLike) -> tuple[Float, Float]:
    """Return the gradients of prediction and target."""
    difference = f64(prediction) - f64(target)
    slope = f64(dy) * 2 * difference / difference.size
    return slope, -slope


def cross_entropy(logits: ArrayLike, labels: ArrayLike, **options: Any) -> Float:
    """Return Σ w_label (lse(logits) − logits[label]) over the labels that are not ignored, reduced by ``reduction``.

    ``weight`` has one element for each class, and ``ignore_index`` is the label to
    ignore; "mean" divides by the sum of the weights of the other labels.
    """
    losses, weights, _ = _cross_entropy_rows(logits, labels, **options)
    return _reduce(losses * weights, weights, options.get("reduction", "mean")).reshape(
        np.shape(labels) if options.get("reduction", "mean") == "none" else ()
    )


def cross_entropy_gradient(dy: ArrayLike, logits: ArrayLike, labels: ArrayLike, **options: Any) -> Float:
    """Return the gradient of the logits, row by row."""
    _, weights, flat = _cross_entropy_rows(logits, labels, **options)
    total = np.sum(weights) if options.get("reduction", "mean") == "mean" else 1.0
    upstream = np.broadcast_to(f64(dy).reshape(-1), weights.shape)
    dlogits = np.zeros_like(flat)
    for row, label in enumerate(np.asarray(labels).reshape(-1)):
        if label == options.get("ignore_index"):
            continue
        one_hot = np.arange(flat.shape[-1]) == label
        dlogits[row] = upstream[row] * weights[row] / total * (softmax(flat[row]) - one_hot)
    return dlogits.reshape(np.shape(logits))


def cross_entropy_weight_gradient(
    dy: ArrayLike, logits: ArrayLike, labels: ArrayLike, weight: ArrayLike, **options: Any
) -> Float:
    """Return the gradient of the class weights: Σ of the loss over a class's rows, less the mean for "mean"."""
    mean = options.get("reduction", "mean") == "mean"
    losses, weights, _ = _cross_entropy_rows(logits, labels, weight, **options)
    upstream = np.broadcast_to(f64(dy).reshape(-1), weights.shape)
    loss, total = (np.sum(losses * weights) / np.sum(weights), np.sum(weights)) if mean else (0.0, 1.0)
    dweight = np.zeros(len(f64(weight)))
    for row, label in enumerate(np.asarray(labels).reshape(-1)):
        if label != options.get("ignore_index"):
            dweight[label] += upstream[row] * (losses[row] - loss) / total
    return dweight


def _cross_entropy_rows(
    logits: ArrayLike, labels: ArrayLike, weight: ArrayLike | None = None, ignore_index: int | None = None, **_: Any
) -> tuple[Float, Float, Float]:
    """Return each row's loss and weight (zero for ignored labels), and the logits as rows."""
    flat = f64(logits).reshape(-1, np.shape(logits)[-1])
    class_weight = np.ones(flat.shape[-1]) if weight is None else f64(weight)
    losses, weights = np.zeros(len(flat)), np.zeros(len(flat))
    for row, label in enumerate(np.asarray(labels).reshape(-1)):
        if label == ignore_index:
            continue
        peak = np.max(flat[row])
        losses[row] = peak + np.log(np.sum(np.exp(flat[row] - peak))) - flat[row, label]
        weights[row] = class_weight[label]
    return losses, weights, flat


def _reduce(losses: Float, weights: Float, reduction: str) -> Float:
    if reduction == "none":
        return losses
    return np.asarray(np.sum(losses) / np.sum(weights) if reduction == "mean" else np.sum(losses))
