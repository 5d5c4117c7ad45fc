"""Losses and softmax at both ends of the range, and with excluded classes, against exact arithmetic."""

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Context, Decimal, localcontext
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import TOLERANCES, assert_close

F = pa.functional
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38,
           "float64": float(np.finfo("float64").max)}  # fmt: skip
LEAST = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
"""The least normal numbers: some libraries flush subnormal numbers to zero."""
HALF_A_DIGIT = {"float16": 12, "bfloat16": 9, "float32": 25, "float64": 54}


def agree(actual: Any, expected: Any, dtype: str, what: str, scale: float = 0.0) -> None:
    """Compare relative to the largest expected value, or to ``scale``; errors below the least number are ignored."""
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(scale, float(np.max(finite, initial=0.0)), LEAST[dtype] / TOLERANCES[dtype])
    assert_close(actual, expected, dtype, scale=scale, what=what)


@contextmanager
def exact() -> Iterator[None]:
    """Compute with decimals of 60 digits, whose range ends far beyond that of every dtype."""
    with localcontext(Context(prec=60, Emin=-(10**17), Emax=10**17, traps=[])):
        yield


def decimals(x: Any) -> Any:
    return np.vectorize(lambda value: Decimal(float(value)), otypes=[object])(x)


def held(x: Any, dtype: str) -> Any:
    """Return decimals as float64, infinite beyond the range of the dtype."""
    past = Decimal(LARGEST[dtype]) * (1 + Decimal(2) ** -HALF_A_DIGIT[dtype])  # rounds to infinity from here
    return np.vectorize(lambda v: float(v) if abs(v) <= past else np.copysign(np.inf, float(v)), otypes=[float])(x)


def log_p(x: Any) -> Any:
    """Return log softmax of rows of decimals; −∞ excludes a class."""
    there = np.array([[value.is_finite() for value in row] for row in x])
    log = np.full(x.shape, Decimal("-Infinity"))
    for i, finite in enumerate(there):
        shifted = x[i, finite] - max(x[i, finite])
        log[i, finite] = shifted - np.sum(exp(shifted)).ln()
    return log


def exp(x: Any) -> Any:
    return np.vectorize(lambda value: value.exp(), otypes=[object])(x)


# ---- the mean squared error -----------------------------------------------------------------------------------------

# Prediction, target and upstream gradient from the largest number of the dtype, the least, and their roots. The rest of
# 64 elements are zeros: arrays of one shape are compiled once.
PAIRS: dict[str, Any] = {
    "the difference overflows": lambda b, t: ([0.75 * b, 1.0], [-0.75 * b, 1.0], 2.0**-8),
    "a square overflows": lambda b, t: ([2 * b**0.5], [0.0], 1.0),
    "the sum overflows": lambda b, t: ([b**0.5 / 2] * 64, [-(b**0.5) / 4] * 64, 1.0),
    "the squares are small": lambda b, t: ([64 * t**0.5, -(t**0.5)], [t**0.5, t**0.5], 1.0),
    "close and large": lambda b, t: ([b, 1.0], [b * (1 - 2.0**-5), 1.0], 0.25),
    "small, of a large upstream": lambda b, t: ([8 * t, -8 * t], [0.0, 8 * t], b / 4),
    "large, of a small upstream": lambda b, t: ([b / 2, b / 4], [-b / 2, 0.0], 8 * t),
    "large and small": lambda b, t: ([b / 2, 512 * t], [0.0, 0.0], 1.0),
}


def padded(x: Any) -> Any:
    return np.pad(x, (0, 64 - len(x)))


@pytest.mark.parametrize("case", PAIRS)
def test_mse(make: Any, to_np: Any, dtype: Any, case: Any) -> None:
    *pair, dloss = PAIRS[case](LARGEST[dtype], LEAST[dtype])
    prediction, target, upstream = (make(x, dtype) for x in (*map(padded, pair), dloss))
    loss, cache = F.mse_loss_forward(prediction, target)
    grads = F.mse_loss_backward(upstream, cache)
    with exact():
        difference, dy = decimals(to_np(prediction)) - decimals(to_np(target)), decimals(to_np(upstream))
        want_loss, want = (held(x / 64, dtype) for x in (np.sum(difference**2), 2 * difference * dy))
    agree(to_np(loss), want_loss, dtype, "loss")
    for got, expected in zip(to_np(grads.prediction), want, strict=True):  # element by element
        agree(got, expected, dtype, "gradient")
    np.testing.assert_array_equal(to_np(grads.target), -to_np(grads.prediction))


# ---- softmax and its logarithm --------------------------------------------------------------------------------------


def rows(b: float) -> Any:
    """Return logits that are far apart, tiny, equal, and some that are −inf."""
    return np.array([
        [b, -b, 0.0, b], [0.0, -b, -b, -b], [-b] * 4, [-b, -b / 2, -b, -b],
        [0.0] * 4, [b] * 4, [-np.inf, 0.0, 1.0, -np.inf], [b, -np.inf, b, 0.0],
    ])  # fmt: skip


UPSTREAMS: dict[str, Any] = {
    "largest": lambda b, t: [b] * 4,
    "largest of both signs": lambda b, t: [b, -b, b / 2, -b],
    "least": lambda b, t: [64 * t, -64 * t, 128 * t, 64 * t],
}


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_softmax(make: Any, to_np: Any, dtype: Any, upstream: Any) -> None:
    largest = LARGEST[dtype]
    x = make(rows(largest), dtype)
    dy = make(np.broadcast_to(UPSTREAMS[upstream](largest, LEAST[dtype]), (8, 4)), dtype)
    scale = float(np.max(np.abs(to_np(dy))))
    with exact():
        log, slope = log_p(decimals(to_np(x))), decimals(to_np(dy))
        p = exp(log)
        want = {
            "softmax": (p, p * (slope - np.sum(p * slope, axis=-1, keepdims=True))),
            "log_softmax": (log, slope - p * np.sum(slope, axis=-1, keepdims=True)),
        }
        wanted = {name: [held(array, dtype) for array in arrays] for name, arrays in want.items()}
    for name, (want_y, want_dx) in wanted.items():
        y, cache = getattr(F, f"{name}_forward")(x)
        (dx,) = getattr(F, f"{name}_backward")(dy, cache)
        for i in range(8):  # row by row
            agree(to_np(y)[i], want_y[i], dtype, f"{name} of row {i}")
            agree(to_np(dx)[i], want_dx[i], dtype, f"gradient of {name} of row {i}", scale)


# ---- cross-entropy --------------------------------------------------------------------------------------------------

# logits, labels, weight and upstream gradient
SAMPLES: dict[str, Any] = {
    "far from right": lambda b, t: ([[b, -b, 0.0], *[[0.0, 0.0, 0.0]] * 11], [1, *[2] * 11], None, 1.0),
    "far from right, all": lambda b, t: ([[b / 2, -b / 4, 0.0]] * 12, [1] * 12, None, 1.0),
    "heavy": lambda b, t: ([[1.0, 2.0, 0.0]] * 12, [0, 1, 2] * 4, [b, b / 2, b], 2.0**-8),
    "light": lambda b, t: ([[1.0, 2.0, 0.0]] * 12, [0, 1, 2] * 4, [512 * t, 1024 * t, 512 * t], 1.0),
    "light and far": lambda b, t: ([[b / 2, -b / 4, 0.0]] * 12, [1, 2, 0] * 4, [512 * t, 512 * t, 256 * t], 1.0),
    "left out": lambda b, t: ([[1.0, -np.inf, 0.0]] * 12, [0, 2, 2] * 4, [1.0, 0.0, 2.0], 1.0),
}


def shares(labels: Any) -> Any:
    """Return probabilities that are mostly at the labels, and zero at the class after it."""
    p = np.zeros((len(labels), 3))
    p[np.arange(len(labels)), labels] = 0.75
    p[np.arange(len(labels)), np.array([2, 0, 0])[np.array(labels)]] += 0.25
    return p


def wanted_losses(x: Any, share: Any, weight: Any, dy: Any, reduction: str, soft: bool) -> Any:
    """Return the loss and the gradients for the logits, the labels and the weight, in decimals."""
    log = log_p(x)
    left_out = np.vectorize(lambda cost, share: cost.is_infinite() and not share)
    cost = np.where(left_out(-log, share), decimals(np.zeros(log.shape)), -log)
    heavy = share * weight
    total = Decimal(1)
    if reduction == "mean":
        total = Decimal(len(x)) if soft else np.sum(heavy)
    loss = np.sum(heavy * cost) / total
    dlogits = (exp(log) * np.sum(heavy, axis=-1, keepdims=True) - heavy) * dy / total
    dweight = np.sum(share * (cost if soft or reduction == "sum" else cost - loss), axis=0) * dy / total
    return loss, dlogits, cost * weight * dy / total, dweight


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("soft", [False, True], ids=["labels", "probabilities"])
@pytest.mark.parametrize("case", SAMPLES)
def test_cross_entropy(make: Any, to_np: Any, dtype: Any, case: Any, soft: bool, reduction: str) -> None:
    logits, labels, weight, upstream = SAMPLES[case](LARGEST[dtype], LEAST[dtype])
    x, dy = make(logits, dtype), make(upstream, dtype)
    w = None if weight is None else make(weight, dtype)
    given = make(shares(labels), dtype) if soft else make(labels, "int64")
    loss, cache = F.cross_entropy_forward(x, given, weight=w, reduction=reduction)
    grads = F.cross_entropy_backward(dy, cache)
    with exact():
        share = decimals(shares(labels) if soft else np.eye(3)[labels])
        heavy = decimals(np.ones(3) if w is None else to_np(w))
        want = wanted_losses(decimals(to_np(x)), share, heavy, decimals(to_np(dy)), reduction, soft)
        want_loss, *slopes = (held(array, dtype) for array in want)
    agree(to_np(loss), want_loss, dtype, "loss")
    for name, got, slope in zip(grads._fields, grads, slopes, strict=True):
        if got is not None:
            agree(to_np(got), slope, dtype, f"gradient of {name}")


def test_a_class_that_teacher_and_student_leave_out(make: Any, to_np: Any, dtype: Any) -> None:
    """The gradient through both softmaxes is that without the class: for logits (0, 1) and (0, 2), ±2 p (1 - p)."""
    p, cache = F.softmax_forward(make([[0.0, 1.0, -np.inf]], dtype))
    _, loss_cache = F.cross_entropy_forward(make([[0.0, 2.0, -np.inf]], dtype), p)
    grads = F.cross_entropy_backward(make(1.0, dtype), loss_cache)
    assert to_np(grads.labels)[0, 2] == 0.0
    slope = 2 * np.e / (1 + np.e) ** 2  # 0.393
    assert_close(to_np(F.softmax_backward(grads.labels, cache).x), [[slope, -slope, 0.0]], dtype)
    student, teacher = np.exp(2) / (1 + np.exp(2)), np.e / (1 + np.e)
    assert_close(to_np(grads.logits), [[teacher - student, student - teacher, 0.0]], dtype, scale=1.0)
