"""The cross-entropy of logits against labels, and its backward."""

from __future__ import annotations

import numbers
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache, dtype_name
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels import cast, widen
from ..registry import owner
from ._checks import expect_one_dtype, expect_rank, expect_shape, is_floating, is_integer, shown
from ._dispatch import Operation, run, run_backward, run_with_cache

__all__ = ["CrossEntropyGrads", "cross_entropy", "cross_entropy_backward", "cross_entropy_forward"]


class CrossEntropyGrads(NamedTuple):
    """The gradients of :func:`cross_entropy`; None for integer labels and for an absent weight."""

    logits: Array
    labels: Array | None
    weight: Array | None


class Saved(NamedTuple):
    """What the backward needs."""

    log_p: Array
    share: Array
    loss: Array
    total: Array | None
    weight: Array | None
    reduction: str


def forward(
    backend: Backend, logits: Array, labels: Array, weight: Array | None, *, ignore_index: int | None, reduction: str
) -> tuple[Array, Saved]:
    """Return Σ w · share · (log Σ exp(logits) − logits), w the weight of each class, reduced."""
    xp = backend.namespace()
    wide = widen(xp, logits)
    zero = xp.zeros_like(wide)
    shifted = wide - xp.max(wide, axis=-1, keepdims=True)
    log_p = shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))  # (…, classes)
    share = widen(xp, labels) if is_floating(labels) else _chosen(backend, logits, labels, ignore_index)  # (…, classes)
    hot = _hot(xp, share, weight, wide)  # (…, classes)
    # Where nothing is chosen, or with weight zero, the loss is zero even if the probability underflows to log 0.
    loss = -xp.sum(xp.where(xp.equal(hot, 0), zero, hot * log_p), axis=-1)  # (…)
    total = None
    if reduction == "mean":
        total = xp.sum(xp.ones_like(loss) if is_floating(labels) else hot)
        loss = xp.sum(loss) / total
    elif reduction == "sum":
        loss = xp.sum(loss)
    return cast(xp, loss, logits.dtype), Saved(log_p, share, loss, total, weight, reduction)


def backward(backend: Backend, dy: Array, saved: Saved) -> CrossEntropyGrads:
    """Return (softmax · Σ hot − hot) · dy for the logits, hot = w · share; for share and w what multiplies them."""
    xp = backend.namespace()
    log_p, share, loss, total, weight, reduction = saved
    hot = _hot(xp, share, weight, log_p)  # (…, classes)
    dloss = widen(xp, dy)
    if reduction == "mean":
        dloss = dloss / total
    if reduction == "none":
        dloss = dloss[..., None]
    # loss = −Σ hot · log p
    dlogits = (xp.exp(log_p) * xp.sum(hot, axis=-1, keepdims=True) - hot) * dloss  # (…, classes)
    soft = is_floating(share)
    if not soft:
        counted = xp.any(share, axis=-1, keepdims=True)  # (…, 1): what stands in another row reaches nothing
        dlogits = xp.where(counted, dlogits, xp.zeros_like(dlogits))
    dlogits = cast(xp, dlogits, dy.dtype)
    if weight is None and not soft:
        return CrossEntropyGrads(dlogits, None, None)
    # Where labels are integers the mean's denominator depends on the weights, too.
    dhot = (-log_p - loss if reduction == "mean" and not soft else -log_p) * dloss  # (…, classes)
    dlabels = cast(xp, dhot if weight is None else dhot * widen(xp, weight), dy.dtype) if soft else None
    if weight is None:
        return CrossEntropyGrads(dlogits, dlabels, None)
    dhot = xp.where(xp.not_equal(share, 0) if soft else share, dhot, xp.zeros_like(dhot))
    rows = tuple(range(log_p.ndim - 1))
    dweight = xp.sum(share * dhot if soft else dhot, axis=rows)  # (classes,)
    return CrossEntropyGrads(dlogits, dlabels, cast(xp, dweight, weight.dtype))


def _hot(xp: Any, share: Array, weight: Array | None, like: Array) -> Array:
    """Return each class's share in the label, or one where a label is, times the weight of the class."""
    weights = xp.ones_like(like) if weight is None else xp.broadcast_to(cast(xp, weight, like.dtype), like.shape)
    return weights * share if is_floating(share) else xp.where(share, weights, xp.zeros_like(like))


OPERATION = Operation("cross_entropy", forward, backward)


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

    or, where a label is a share of each class, the sum of this over the classes, weighted by their shares.

    Parameters
    ----------
    logits : array (…, classes)
        Floating; computed in float32 at least.
    labels : array (…) or (…, classes)
        Integers below the number of classes, or ``ignore_index``; or probabilities, in the dtype of the
        logits, which have a gradient.
    weight : array (classes,), optional
        A weight for each class, in the dtype of the logits.
    ignore_index : int, optional
        Samples with this label count for nothing, whatever their logits are.
    reduction : {"mean", "sum", "none"}
        "mean" divides by the summed weights of the samples that count, or by the number of samples whose
        labels are probabilities; where there is none, it is NaN.

    Returns
    -------
    array
        0-d, or ``(…)`` with reduction "none".

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If the shapes do not fit; if the logits are not floating or the labels neither integers nor
        probabilities; if a label is out of range (checked where the labels are at hand on the host;
        elsewhere such a sample counts for nothing), ``reduction`` unknown, or ``ignore_index`` is given
        with probabilities.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> round(float(pa.functional.cross_entropy(np.zeros((1, 4)), np.array([2]))), 6)  # log 4
    1.386294
    """
    return run(OPERATION, *_check(logits, labels, weight, ignore_index, reduction))


def cross_entropy_forward(
    logits: Array,
    labels: Array,
    *,
    weight: Array | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> tuple[Array, Cache]:
    """Return ``(cross_entropy(logits, labels, …), cache)``."""
    return run_with_cache(OPERATION, *_check(logits, labels, weight, ignore_index, reduction))


def cross_entropy_backward(dy: Array, cache: Cache) -> CrossEntropyGrads:
    """Return w · (softmax − label) for the logits, −w · log softmax for probabilities, and Σ over rows for weight."""
    return run_backward(OPERATION, dy, cache, CrossEntropyGrads)


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
    soft = _are_probabilities(logits, labels)
    if not soft:
        expect_shape("labels", labels, tuple(logits.shape[:-1]))
    if weight is not None:
        expect_shape("weight", weight, (classes,))
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, numbers.Integral)):
        raise DTypeError(f"ignore_index: expected an integer or None, got {shown(ignore_index)}")
    if soft and ignore_index is not None:
        raise ArgumentError(f"ignore_index: expected None with labels that are probabilities, got {ignore_index}")
    if not soft:
        _check_range(labels, classes, ignore_index)
    return (
        {"logits": logits, "labels": labels, "weight": weight},
        {"ignore_index": None if ignore_index is None else int(ignore_index), "reduction": reduction},
    )


def _are_probabilities(logits: Array, labels: Array) -> bool:
    """Say whether labels are a share of each class, or raise if they are no integers either."""
    if hasattr(labels, "dtype") and is_integer(labels):
        return False
    got = dtype_name(getattr(labels, "dtype", type(labels)))
    if not hasattr(labels, "dtype") or not is_floating(labels):
        raise DTypeError(f"labels: expected integers, or the dtype of the logits for probabilities, got {got}")
    if tuple(labels.shape) != tuple(logits.shape):
        raise DTypeError(
            f"labels: expected integers, got {got}; probabilities would be of the logits' shape "
            f"{tuple(logits.shape)}, and these are of {tuple(labels.shape)}"
        )
    expect_one_dtype(logits=logits, labels=labels)
    return True


def _check_range(labels: Array, classes: int, ignore_index: int | None) -> None:
    """Check labels whose values are at hand on the host."""
    backend = owner(labels, "labels")
    if not backend.state(labels).readable:
        return
    values = backend.to_numpy(labels)
    counted = values if ignore_index is None else values[values != ignore_index]
    wrong = counted[(counted < 0) | (counted >= classes)]
    if wrong.size:
        ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise ArgumentError(f"labels: expected integers in [0, {classes}){ignored}, got {int(wrong[0])}")
