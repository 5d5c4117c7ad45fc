"""The cross-entropy of logits against labels, and its backward."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache, dtype_name
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels import cast, widen
from ..registry import owner
from ._operation import Operation, expect_one_dtype, expect_rank, expect_shape, is_integer, shown

__all__ = ["CrossEntropyGrads", "cross_entropy", "cross_entropy_backward", "cross_entropy_forward"]


class CrossEntropyGrads(NamedTuple):
    """The gradients of :func:`cross_entropy`; None for the integer labels and for an absent weight."""

    logits: Array
    labels: None
    weight: Array | None


def forward(
    backend: Backend, logits: Array, labels: Array, weight: Array | None, *, ignore_index: int | None, reduction: str
) -> tuple[Array, tuple[Array | None, ...]]:
    """Return w · (log Σ exp(logits) − logits[label]), w the weight of the label's class, reduced."""
    xp = backend.namespace()
    wide = widen(xp, logits)
    zero = xp.zeros_like(wide)
    shifted = wide - xp.max(wide, axis=-1, keepdims=True)
    log_p = shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))  # (…, classes)
    chosen = _chosen(backend, logits, labels, ignore_index)  # (…, classes)
    hot = _hot(xp, chosen, weight, wide)  # (…, classes)
    # Where nothing is chosen, or with weight zero, the loss is zero even if the probability underflows to log 0.
    loss = -xp.sum(xp.where(xp.equal(hot, 0), zero, hot * log_p), axis=-1)  # (…)
    total = None
    if reduction == "mean":
        total = xp.sum(hot)
        loss = xp.sum(loss) / total
    elif reduction == "sum":
        loss = xp.sum(loss)
    return cast(xp, loss, logits.dtype), (log_p, chosen, loss, total, weight)


def backward(
    backend: Backend, dy: Array, saved: tuple[Any, ...], *, ignore_index: int | None, reduction: str
) -> tuple[Array, None, Array | None]:
    """Return w · (softmax − one-hot) · dy for the logits, and Σ (loss − mean) · dy for each class's weight."""
    xp = backend.namespace()
    log_p, chosen, loss, total, weight = saved
    hot = _hot(xp, chosen, weight, log_p)  # (…, classes)
    dloss = widen(xp, dy)
    if reduction == "mean":
        dloss = dloss / total
    if reduction == "none":
        dloss = dloss[..., None]
    # loss = −Σ hot · log p
    dlogits = (xp.exp(log_p) * xp.sum(hot, axis=-1, keepdims=True) - hot) * dloss  # (…, classes)
    counted = xp.any(chosen, axis=-1, keepdims=True)  # (…, 1): what stands in another row reaches nothing
    dlogits = cast(xp, xp.where(counted, dlogits, xp.zeros_like(dlogits)), dy.dtype)
    if weight is None:
        return dlogits, None, None
    dhot = (-log_p - loss if reduction == "mean" else -log_p) * dloss  # (…, classes)
    rows = tuple(range(log_p.ndim - 1))
    dweight = xp.sum(xp.where(chosen, dhot, xp.zeros_like(dhot)), axis=rows)  # (classes,)
    return dlogits, None, cast(xp, dweight, weight.dtype)


def _hot(xp: Any, chosen: Array, weight: Array | None, like: Array) -> Array:
    """Return the weight of its class where a label is, else zero."""
    weights = xp.ones_like(like) if weight is None else xp.broadcast_to(cast(xp, weight, like.dtype), like.shape)
    return xp.where(chosen, weights, xp.zeros_like(like))


_operation = Operation("cross_entropy", forward, backward)


def cross_entropy(
    logits: Array,
    labels: Array,
    *,
    weight: Array | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Array:
    r"""Return the negative log-likelihood of labels under softmax(logits).

    .. math:: \ell_i = w_{y_i} \Bigl(\log \sum_c e^{x_{ic}} - x_{i y_i}\Bigr)

    Parameters
    ----------
    logits : array (…, classes)
        Floating; computed in float32 at least.
    labels : array (…)
        Integers below the number of classes, or ``ignore_index``.
    weight : array (classes,), optional
        A weight for each class, in the dtype of the logits.
    ignore_index : int, optional
        Samples with this label count for nothing, whatever their logits are.
    reduction : {"mean", "sum", "none"}
        "mean" divides by the summed weights of the samples that count; where none does, it is NaN.

    Returns
    -------
    array
        0-d, or ``(…)`` with reduction "none".

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If the shapes do not fit; if the logits are not floating or the labels not integers; if a label
        is out of range (checked where the labels are at hand on the host; elsewhere such a sample counts
        for nothing) or ``reduction`` unknown.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> round(float(pa.functional.cross_entropy(np.zeros((1, 4)), np.array([2]))), 6)  # log 4
    1.386294
    """
    return _operation.call(*_check(logits, labels, weight, ignore_index, reduction))


def cross_entropy_forward(
    logits: Array,
    labels: Array,
    *,
    weight: Array | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Array, Cache]:
    """Return ``(cross_entropy(logits, labels, …), cache)``."""
    return _operation.record(*_check(logits, labels, weight, ignore_index, reduction))


def cross_entropy_backward(dy: Array, cache: Cache) -> CrossEntropyGrads:
    """Return w · (softmax − one-hot) for the logits, and the gradient of the class weights, as reduced."""
    return _operation.pull(dy, cache, CrossEntropyGrads)


def _chosen(backend: Backend, logits: Array, labels: Array, ignore_index: int | None) -> Array:
    """Return which class each label names, (…, classes); no class where the label is out of range or ignored."""
    xp, classes = backend.namespace(), logits.shape[-1]
    # A narrow type may not hold the number of classes, and not every library compares unsigned ones.
    labels = cast(xp, labels, xp.int64 if dtype_name(labels.dtype).endswith("64") else xp.int32)
    device = backend.native_device(backend.device_of(logits))
    chosen = xp.equal(labels[..., None], xp.arange(classes, dtype=labels.dtype, device=device))
    if ignore_index is None or not 0 <= ignore_index < classes:
        return chosen
    return xp.logical_and(chosen, xp.not_equal(labels, ignore_index)[..., None])


def _check(
    logits: Array, labels: Array, weight: Array | None, ignore_index: int | None, reduction: str
) -> tuple[dict[str, Array | None], dict[str, object]]:
    expect_one_dtype(logits=logits, weight=weight)
    expect_rank("logits", logits, 1)
    classes = logits.shape[-1]
    if classes == 0:
        raise ShapeError(f"logits: expected at least one class, got shape {tuple(logits.shape)}")
    if not hasattr(labels, "dtype") or not is_integer(labels):
        raise DTypeError(f"labels: expected integers, got {dtype_name(getattr(labels, 'dtype', type(labels)))}")
    expect_shape("labels", labels, tuple(logits.shape[:-1]))
    if weight is not None:
        expect_shape("weight", weight, (classes,))
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral)):
        raise DTypeError(f"ignore_index: expected an integer or None, got {shown(ignore_index)}")
    backend = owner(labels, "labels")
    if backend.on_host(labels):
        values = backend.to_numpy(labels)
        counted = values if ignore_index is None else values[values != ignore_index]
        wrong = counted[(counted < 0) | (counted >= classes)]
        if wrong.size:
            raise ArgumentError(
                f"labels: expected integers in [0, {classes})"
                f"{'' if ignore_index is None else f' or ignore_index={ignore_index}'}, got {int(wrong[0])}"
            )
    return (
        {"logits": logits, "labels": labels, "weight": weight},
        {"ignore_index": None if ignore_index is None else int(ignore_index), "reduction": reduction},
    )
