"""Mean squared error and cross-entropy."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(17)
PREDICTION, TARGET = RNG.standard_normal((2, 4, 6)), RNG.standard_normal((2, 4, 6))
LOGITS = RNG.standard_normal((2, 4, 5)) * 3
LABELS = np.array([[0, 2, 4, 2], [1, 2, 3, 0]])
SHARES = RNG.random((2, 4, 5))
WEIGHT = np.array([0.5, 1.0, 2.0, 0.25, 3.0])
OPTIONS = [
    {"reduction": reduction, **ignored}
    for reduction in ("mean", "sum", "none")
    for ignored in ({}, {"ignore_index": 2})
]


def test_mse(make: Any, to_np: Any, dtype: Any) -> None:
    prediction, target = make(PREDICTION, dtype), make(TARGET, dtype)
    hosts = [to_np(x).astype(np.float64) for x in (prediction, target)]
    loss, cache = F.mse_loss_forward(prediction, target)
    assert tuple(loss.shape) == ()
    assert type(loss) is type(F.mse_loss(prediction, target)) is type(prediction)
    assert_close(to_np(loss), ref.mse_loss(*hosts), dtype)
    assert_close(to_np(F.mse_loss(prediction, target)), ref.mse_loss(*hosts), dtype)
    grads = F.mse_loss_backward(make(1.5, dtype), cache)
    for gradient, want in zip(grads, ref.mse_loss_gradients(1.5, *hosts), strict=True):
        assert gradient.dtype == prediction.dtype
        assert_close(to_np(gradient), want, dtype)


def test_mse_of_many_in_low_precision(make: Any, to_np: Any, dtype: Any) -> None:
    """The sum of 70000 ones exceeds the largest float16; their mean is 1."""
    ones = make(np.ones((70, 1000)), dtype)
    np.testing.assert_array_equal(to_np(F.mse_loss(ones, make(np.zeros((70, 1000)), dtype))), 1.0)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_cross_entropy(make: Any, to_np: Any, dtype: Any, options: Any, weighted: Any) -> None:
    logits, labels = make(LOGITS, dtype), make(LABELS, "int64")
    weight = make(WEIGHT, dtype) if weighted else None
    host = {**options, "weight": to_np(weight) if weighted else None}
    held = to_np(logits)
    loss, cache = F.cross_entropy_forward(logits, labels, weight=weight, **options)
    want = ref.cross_entropy(held, LABELS, **host)
    assert type(loss) is type(logits)
    assert_close(to_np(loss), want, dtype)
    assert_close(to_np(F.cross_entropy(logits, labels, weight=weight, **options)), want, dtype)
    upstream = make(RNG.standard_normal(LABELS.shape) if options["reduction"] == "none" else 0.7, dtype)
    grads = F.cross_entropy_backward(upstream, cache)
    assert grads.labels is None
    assert grads.logits.dtype == logits.dtype
    dlogits = ref.cross_entropy_gradient(to_np(upstream), held, LABELS, **host)
    assert_close(to_np(grads.logits), dlogits, dtype, what="gradient of logits")
    assert (grads.weight is None) == (weight is None)
    if weight is None or grads.weight is None:
        return
    dweight = ref.cross_entropy_weight_gradient(to_np(upstream), held, LABELS, **host)
    assert grads.weight.dtype == weight.dtype
    assert_close(to_np(grads.weight), dweight, dtype, what="gradient of weight")


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_probabilities(make: Any, to_np: Any, dtype: Any, reduction: Any, weighted: Any) -> None:
    """The loss of probability labels is the sum over the classes, weighted by the probabilities."""
    logits, labels, weight = make(LOGITS, dtype), make(SHARES, dtype), make(WEIGHT, dtype) if weighted else None
    loss, cache = F.cross_entropy_forward(logits, labels, weight=weight, reduction=reduction)
    upstream = make(RNG.standard_normal(LABELS.shape) if reduction == "none" else 0.7, dtype)
    grads = F.cross_entropy_backward(upstream, cache)

    held, host, shares = to_np(logits), to_np(weight) if weighted else np.ones(5), to_np(labels).astype(np.float64)
    of_rows: Any = {"reduction": "none"}
    dlosses = np.broadcast_to(to_np(upstream) / (LABELS.size if reduction == "mean" else 1), LABELS.shape)
    losses, dlogits, dweight, dlabels = (
        np.zeros(LABELS.shape),
        np.zeros(LOGITS.shape),
        np.zeros(5),
        np.zeros(LOGITS.shape),
    )
    for label in range(5):
        share, everywhere = shares[..., label], np.full(LABELS.shape, label)
        of_label = ref.cross_entropy(held, everywhere, weight=host, **of_rows)
        losses += share * of_label
        dlabels[..., label] = dlosses * of_label
        dlogits += ref.cross_entropy_gradient(dlosses * share, held, everywhere, weight=host, **of_rows)
        dweight += ref.cross_entropy_weight_gradient(dlosses * share, held, everywhere, host, **of_rows)
    want = losses if reduction == "none" else np.sum(losses) / (LABELS.size if reduction == "mean" else 1)
    assert_close(to_np(loss), want, dtype)
    for name, gradient, slope in zip(
        grads._fields, grads, (dlogits, dlabels, dweight if weighted else None), strict=True
    ):
        assert (gradient is None) == (slope is None)
        if gradient is not None:
            assert gradient.dtype == logits.dtype
            assert_close(to_np(gradient), slope, dtype, what=f"gradient of {name}")


def test_a_share_of_zero_costs_nothing(make: Any, to_np: Any) -> None:
    """A class with probability 0 contributes nothing, even if its logit is −inf."""
    logits, labels, weight = make([[0.3, -np.inf, 1.2]]), make([[0.25, 0.0, 0.75]]), make([1.0, 2.0, 3.0])
    loss, cache = F.cross_entropy_forward(logits, labels, weight=weight)
    want = sum(w * ref.cross_entropy([[0.3, 1.2]], [i]) for i, w in enumerate((0.25, 0.75 * 3)))
    assert_close(to_np(loss), want)
    grads = F.cross_entropy_backward(make(1.0), cache)
    assert to_np(grads.logits)[0, 1] == to_np(grads.weight)[1] == 0.0


def test_central_differences(make: Any, to_np: Any) -> None:
    labels = make(LABELS, "int64")

    def loss(logits: Any, weight: Any) -> Any:
        return float(to_np(F.cross_entropy(make(logits), labels, weight=make(weight), ignore_index=2)))

    _, cache = F.cross_entropy_forward(make(LOGITS), labels, weight=make(WEIGHT), ignore_index=2)
    grads = F.cross_entropy_backward(make(1.0), cache)
    slopes_agree(loss, [LOGITS, WEIGHT], [to_np(grads.logits), to_np(grads.weight)])
    _, cache = F.mse_loss_forward(make(PREDICTION), make(TARGET))
    slopes_agree(
        lambda prediction, target: float(to_np(F.mse_loss(make(prediction), make(target)))),
        [PREDICTION, TARGET],
        [to_np(gradient) for gradient in F.mse_loss_backward(make(1.0), cache)],
    )


def test_cross_entropy_of_large_logits(make: Any, to_np: Any) -> None:
    """The loss is 0 for a certain correct prediction, the logits' difference for a wrong one; no overflow."""
    logits, labels = make([[1e4, 0.0], [1e4, 0.0]]), make([0, 1], "int64")
    losses, cache = F.cross_entropy_forward(logits, labels, reduction="none")
    assert_close(to_np(losses), [0.0, 1e4])
    assert_close(to_np(F.cross_entropy_backward(make([1.0, 1.0]), cache).logits), [[0.0, 0.0], [1.0, -1.0]])


def test_excluded_class(make: Any, to_np: Any) -> None:
    """A logit of −inf excludes a class: the other results are those without the class."""
    logits = make([[0.3, -np.inf, 1.2]])
    loss, cache = F.cross_entropy_forward(logits, make([2], "int64"))
    assert_close(to_np(loss), ref.cross_entropy([[0.3, 1.2]], [1]))
    dlogits = to_np(F.cross_entropy_backward(make(1.0), cache).logits)
    assert_close(dlogits[:, [0, 2]], ref.cross_entropy_gradient(1.0, [[0.3, 1.2]], [1]))
    assert dlogits[0, 1] == 0.0


def test_bad_arguments(make: Any) -> None:
    logits, labels = make(LOGITS), make(LABELS, "int64")
    with pytest.raises(ValueError, match="reduction"):
        F.cross_entropy(logits, labels, reduction="median")
    with pytest.raises(pa.DTypeError, match="labels"):
        F.cross_entropy(logits, make(LABELS, "float64"))
    with pytest.raises(pa.DTypeError, match="one dtype"):
        F.cross_entropy(logits, make(SHARES, "float32"))
    with pytest.raises(pa.ArgumentError, match="ignore_index"):
        F.cross_entropy(logits, make(SHARES), ignore_index=2)
    with pytest.raises(pa.ShapeError, match="labels"):
        F.cross_entropy(logits, make(LABELS[:, :3], "int64"))
    with pytest.raises(pa.ShapeError, match="weight"):
        F.cross_entropy(logits, labels, weight=make(WEIGHT[:3]))
    with pytest.raises(pa.ShapeError, match="target"):
        F.mse_loss(make(PREDICTION), make(TARGET[:, :3]))
