"""The cross-entropy of logits against labels, and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache, dtype_name
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels import cast, widen
from ..registry import owner
from ._checks import expect_one_dtype, expect_rank, expect_shape, is_floating, is_integer, is_integer_number, shown
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._range import product, unit_of

__all__ = ["CrossEntropyGrads", "cross_entropy", "cross_entropy_backward", "cross_entropy_forward"]


class CrossEntropyGrads(NamedTuple):
    """The gradients of :func:`cross_entropy`; None for integer labels and for an absent weight."""

    logits: Array
    labels: Array | None
    weight: Array | None


class Saved(NamedTuple):
    """What the backward needs."""

    x: Array
    peak: Array
    log_total: Array
    share: Array
    weight: Array | None
    loss: Array
    reduction: str


def forward(
    backend: Backend, logits: Array, labels: Array, weight: Array | None, *, ignore_index: int | None, reduction: str
) -> tuple[Array, Saved]:
    """Return Σ hot · (log Σ exp(logits) − logits), reduced; hot is label probability · weight for each class."""
    xp = backend.namespace()
    soft = is_floating(labels)
    share = widen(xp, labels) if soft else _one_hot(backend, logits, labels, ignore_index)  # (…, classes)
    x = widen(xp, logits)
    if not soft:  # the logits of ignored rows must not reach any derivative
        x = xp.where(_has_label(xp, share), x, xp.zeros_like(x))
    peak = xp.max(x, axis=-1, keepdims=True)  # (…, 1)
    log_total = xp.log(xp.sum(xp.exp(x - peak), axis=-1, keepdims=True))  # (…, 1)
    hot, _, total = _hot(xp, share, weight, x, reduction)
    cost, _ = _cost(xp, x, peak, log_total, hot)
    loss = xp.sum(hot * cost, axis=-1)  # (…)
    if reduction != "none":
        loss = xp.sum(loss)
    if reduction == "mean":
        loss = xp.where(xp.equal(total, xp.zeros_like(total)), xp.full_like(loss, math.nan), loss)
    return cast(xp, loss * 4.0, logits.dtype), Saved(x, peak, log_total, share, weight, loss, reduction)


def backward(backend: Backend, dy: Array, saved: Saved) -> CrossEntropyGrads:
    """Return (softmax · Σ hot − hot) · dy for the logits; for labels and weight their factors in the loss, times dy."""
    xp = backend.namespace()
    x, peak, log_total, share, weight, loss, reduction = saved
    hot, unit, total = _hot(xp, share, weight, x, reduction)
    dloss = widen(xp, dy)
    if reduction == "none":
        dloss = dloss[..., None]
    # loss = Σ hot · (log Σ exp(x) − x)
    p = xp.exp((x - peak) - log_total)  # (…, classes)
    dlogits = xp.multiply(p * xp.sum(hot, axis=-1, keepdims=True) - hot, dloss)  # (…, classes)
    zero, soft = xp.zeros_like(x), is_floating(share)
    if not soft:
        dlogits = xp.where(_has_label(xp, share), dlogits, zero)
    dlogits = cast(xp, dlogits, dy.dtype)
    if weight is None and not soft:
        return CrossEntropyGrads(dlogits, None, None)
    cost, absent = _cost(xp, x, peak, log_total, hot)
    if not soft:
        # The denominator of the mean, unit · total, also depends on the weights.
        slope = (cost - loss) / total if reduction == "mean" else cost
        slope = xp.where(xp.logical_and(share, xp.logical_not(absent)), slope, zero)
        dweight = _weight_gradient(xp, product(xp, slope, xp.ones_like(unit) / unit, dloss), weight)
        return CrossEntropyGrads(dlogits, None, dweight)
    slope = xp.where(absent, zero, cost / total if reduction == "mean" else cost)
    if weight is None:
        return CrossEntropyGrads(dlogits, cast(xp, xp.multiply(slope, dloss) * 4.0, dy.dtype), None)
    dlabels = product(xp, slope, xp.broadcast_to(cast(xp, weight, x.dtype), x.shape), dloss) * 4.0
    dweight = _weight_gradient(xp, product(xp, slope, share, dloss), weight)
    return CrossEntropyGrads(dlogits, cast(xp, dlabels, dy.dtype), dweight)


def _hot(xp: Any, share: Array, weight: Array | None, x: Array, reduction: str) -> tuple[Array, Array, Array]:
    """Return ``(hot, unit, total)``: the factor of each class in the loss, and the mean's divisor ``unit · total``.

    ``unit`` is about the largest weight in use, so that the sum of the weights divided by it is finite.
    """
    weights = xp.ones_like(x) if weight is None else xp.broadcast_to(cast(xp, weight, x.dtype), x.shape)
    hot = weights * share if is_floating(share) else xp.where(share, weights, xp.zeros_like(x))  # (…, classes)
    total = xp.sum(xp.ones_like(hot[..., 0]))
    unit = one = xp.ones_like(total)
    if reduction != "mean" or 0 in hot.shape:
        return hot, unit, total
    if is_floating(share):
        return hot / total, unit, total
    if weight is not None:
        unit = unit_of(xp, xp.max(xp.abs(hot)))
        hot = hot / unit
    total = xp.sum(hot)
    return hot / xp.where(xp.equal(total, xp.zeros_like(total)), one, total), unit, total


def _cost(xp: Any, x: Array, peak: Array, log_total: Array, hot: Array) -> tuple[Array, Array]:
    """Return −log softmax(x) / 4, which never overflows, and a mask of excluded classes: logit −∞ and hot 0.

    The cost of an excluded class is an arbitrary finite number, so that its product with 0 and the derivatives are 0.
    """
    absent = xp.logical_and(xp.equal(x, xp.full_like(x, -math.inf)), xp.equal(hot, xp.zeros_like(hot)))
    return (peak * 0.25 - xp.where(absent, peak, x) * 0.25) + log_total * 0.25, absent


def _has_label(xp: Any, share: Array) -> Array:
    """Return which rows have a valid label, (…, 1)."""
    return xp.any(share, axis=-1, keepdims=True)


def _weight_gradient(xp: Any, quarter: Array, weight: Array) -> Array:
    """Return the gradient of the weight, (classes,), from a quarter of each row's term."""
    return cast(xp, xp.sum(quarter, axis=tuple(range(quarter.ndim - 1))) * 4.0, weight.dtype)


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

    With probabilities as labels it is the sum of this over the classes, weighted by their probabilities.

    Parameters
    ----------
    logits : array (…, classes)
        Floating; computed in float32 at least.
    labels : array (…) or (…, classes)
        Integers from 0 to below ``classes``, or ``ignore_index``; or probabilities of the classes, in the dtype of
        the logits, which have a gradient. A class with logit −inf and probability 0 is excluded: it adds nothing to
        the loss, and its gradients are 0.
    weight : array (classes,), optional
        A weight for each class, in the dtype of the logits.
    ignore_index : int, optional
        Samples with this label are ignored, whatever their logits are.
    reduction : {"mean", "sum", "none"}
        "mean" divides by the sum of the weights of the samples that are not ignored; with probabilities as labels,
        by the number of samples. It is NaN if that is 0.

    Returns
    -------
    array
        0-d, or ``(…)`` with reduction "none".

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If the shapes do not fit; if the logits are not floating or the labels neither integers nor
        probabilities; if a label is out of range (checked if the labels are readable on the host;
        otherwise such a sample is ignored), ``reduction`` is unknown, or ``ignore_index`` is given
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


def _one_hot(backend: Backend, logits: Array, labels: Array, ignore_index: int | None) -> Array:
    """Return the one-hot labels as booleans, (…, classes); all False where a label is out of range or ignored."""
    xp, classes = backend.namespace(), logits.shape[-1]
    # A narrow dtype may not hold the number of classes, and not every library compares unsigned integers.
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
    if ignore_index is not None and not is_integer_number(ignore_index):
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
    """Return whether labels are probabilities; raise if they are neither probabilities nor integers."""
    if hasattr(labels, "dtype") and is_integer(labels):
        return False
    got = dtype_name(getattr(labels, "dtype", type(labels)))
    if not hasattr(labels, "dtype") or not is_floating(labels):
        raise DTypeError(f"labels: expected integers, or the dtype of the logits for probabilities, got {got}")
    if tuple(labels.shape) != tuple(logits.shape):
        raise DTypeError(
            f"labels: expected integers, got {got}; probabilities would have the logits' shape "
            f"{tuple(logits.shape)}, these have {tuple(labels.shape)}"
        )
    expect_one_dtype(logits=logits, labels=labels)
    return True


def _check_range(labels: Array, classes: int, ignore_index: int | None) -> None:
    """Check the range of labels that are readable on the host."""
    backend = owner(labels, "labels")
    if not backend.state(labels).readable:
        return
    values = backend.to_numpy(labels)
    kept = values if ignore_index is None else values[values != ignore_index]
    wrong = kept[(kept < 0) | (kept >= classes)]
    if wrong.size:
        ignored = "" if ignore_index is None else f" or ignore_index={ignore_index}"
        raise ArgumentError(f"labels: expected integers in [0, {classes}){ignored}, got {int(wrong[0])}")
