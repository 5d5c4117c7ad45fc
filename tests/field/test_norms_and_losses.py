"""Reports of norms, softmax and losses. docs/field.md has the links."""

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(142)


@pytest.mark.parametrize("report", ["pytorch-188375", "pytorch-173598"])
def test_a_norm_of_one_feature(report, make, to_np):
    """The result is the bias, whatever x and the weight: both have gradients of exactly zero."""
    x = 1e6 if report == "pytorch-188375" else 0.37
    for dtype in ("float32", "float64"):
        arrays = make([x], dtype), make([2.0], dtype), make([3.0], dtype)
        y, cache = F.layer_norm_forward(*arrays)
        grads = F.layer_norm_backward(make([0.7], dtype), cache)
        assert [float(to_np(z)[0]) for z in (y, grads.x, grads.weight)] == [3.0, 0.0, 0.0]


def test_pytorch_63541_the_sum_of_a_norm(make, to_np):
    """An upstream gradient that is the same for all features is orthogonal to what a norm lets through."""
    x = make(RNG.random((10, 512)))
    for factor in (1.0, 0.99):
        _, cache = F.layer_norm_forward(x)
        dx = F.layer_norm_backward(make(np.full((10, 512), factor)), cache).x
        assert_close(to_np(dx), np.zeros((10, 512)), scale=1.0)


# Rows far from zero, where mean(x²) − mean(x)² is negative or has no digit.
FAR = {
    "pytorch-81090": np.arange(3_199_968.0, 3_200_000.0),
    "mlx-2238": 1449.0 + np.array([0.57, -0.13, 1.65, 0.26, 0.78, 0.32, 0.33, 0.08, 0.22, 0.43, 0.16, 0.41]),
    "flax-1491": np.full(48, 4095.7),
    "keras-18795": np.concatenate([np.full(63, 1e4 + 1 / 3), [1e4 + 1 / 2]]),
}


@pytest.mark.parametrize("report", FAR)
def test_a_norm_far_from_zero(report, make, to_np):
    x, weight = make(FAR[report], "float32"), make(RNG.standard_normal(FAR[report].shape), "float32")
    dy = make(RNG.standard_normal(FAR[report].shape), "float32")
    held = [to_np(a).astype(np.float64) for a in (dy, x, weight)]
    y, cache = F.layer_norm_forward(x, weight)
    grads = F.layer_norm_backward(dy, cache)
    want = ref.layer_norm(held[1], held[2])
    assert_close(to_np(y), want, "float32", scale=max(1.0, np.abs(want).max()))
    dx, dweight = ref.layer_norm_gradients(*held)[:2]
    assert_close(to_np(grads.x), dx, "float32")
    assert_close(to_np(grads.weight), dweight, "float32", scale=max(1.0, np.abs(dweight).max()))


def test_pytorch_78444_integers_of_no_size(make):
    """Integers are refused, also where there are none to normalise."""
    with pytest.raises(pa.DTypeError, match="x"):
        F.layer_norm(make(np.zeros((0, 0, 16)), "int64"), make(np.ones(16)), make(np.ones(16)))


def test_flash_attention_781_rms_norm_of_zeros(make, to_np):
    """The gradient of the weight is zero, and the same ten times over."""
    x, weight = make(np.zeros(4), "float32"), make(np.full(4, 1.0), "float32")
    for _ in range(10):
        y, cache = F.rms_norm_forward(x, weight, eps=1e-5)
        grads = F.rms_norm_backward(make(-np.ones(4), "float32"), cache)
        np.testing.assert_array_equal(to_np(y), np.zeros(4))
        np.testing.assert_array_equal(to_np(grads.weight), np.zeros(4))
        assert_close(to_np(grads.x), np.full(4, -(1e-5**-0.5)), "float32")


def test_pytorch_189581_rms_norm_of_small_numbers(dtypes, make, to_np):
    """A standard deviation of 0.058 in 16 bits: squares are summed in float32."""
    for dtype in dtypes:
        x = make(0.058 * RNG.standard_normal((2, 4, 1, 32)), dtype)
        want = ref.rms_norm(to_np(x), eps=1e-7)
        assert_close(to_np(F.rms_norm(x, eps=1e-7)), want, dtype)


def test_pytorch_158310_log_softmax_of_large_float16(dtypes, make, to_np):
    """Numbers near −20,000, two of them in each softmax, along an axis in the middle."""
    for dtype in dtypes:
        x = make(RNG.uniform(-20260.0, -19740.0, (3, 2, 5, 2)), dtype)
        assert_close(to_np(F.log_softmax(x, axis=1)), ref.log_softmax(to_np(x), axis=1), dtype)


def test_jax_40409_the_gradient_of_many_float16(dtypes, make, to_np):
    """An upstream gradient of ones over 70,000 numbers: its sum exceeds the largest float16, the gradient does not."""
    for dtype in dtypes:
        x, ones = make(RNG.standard_normal((1, 70_000)), dtype), make(np.ones((1, 70_000)), dtype)
        _, cache = F.log_softmax_forward(x)
        assert_close(
            to_np(F.log_softmax_backward(ones, cache).x), ref.log_softmax_gradient(to_np(ones), to_np(x)), dtype
        )


@pytest.mark.parametrize("report", ["jax-40386", "jax-40344"])
def test_small_gradients_of_a_decided_softmax(report, make, to_np):
    """One probability is 1 to the last digit: errors are below half the last digit of the upstream gradient."""
    z = 37.42994775023705 if report == "jax-40386" else 40.0
    tail = np.exp(-z) / (1 + np.exp(-z)) ** 2
    for name in ("softmax", "log_softmax"):
        _, cache = getattr(F, f"{name}_forward")(make([z, 0.0]))
        dx = to_np(getattr(F, f"{name}_backward")(make([1.0, 0.0]), cache).x)
        assert np.abs(dx - [tail, -tail]).max() <= np.finfo(np.float64).eps / 2
        np.testing.assert_allclose(dx[1], -tail, rtol=1e-12)


def test_jax_20856_a_compiled_softmax_over_the_first_axis(contract, make, to_np):
    """Over axis 0 of (3, 1, 1) the compiled result is the same, and not 1."""
    x = RNG.standard_normal((3, 1, 1))
    for function in (lambda x: F.softmax(x, axis=0), contract.jit(lambda x: F.softmax(x, axis=0))):
        assert_close(to_np(function(make(x))), ref.softmax(x, axis=0))


def test_pytorch_38839_log_softmax_of_large_float32(make, to_np):
    """Near −10⁷ float32 holds integers: the differences are exact, and the result has all its digits."""
    x = make(np.array([[0.0, 0.0, 1.0], [2.0, 0.0, 1.0]]) - 1e7, "float32")
    assert_close(to_np(F.log_softmax(x)), ref.log_softmax([[0.0, 0.0, 1.0], [2.0, 0.0, 1.0]]), "float32")


def test_pytorch_30572_softmax_along_a_middle_axis(dtypes, make, to_np):
    """Softmax along axis 1 and its backward, in the dtype of the input."""
    for dtype in dtypes:
        x, dy = (make(RNG.standard_normal((2, 3, 2, 4)), dtype) for _ in range(2))
        y, cache = F.softmax_forward(x, axis=1)
        dx = F.softmax_backward(dy, cache).x
        assert y.dtype == dx.dtype == x.dtype
        assert_close(to_np(dx), ref.softmax_gradient(to_np(dy), to_np(x), axis=1), dtype)


def test_jax_16208_a_softmax_with_excluded_entries(make, to_np):
    """Entries of −∞ have probability 0 and no gradient; the logarithm's exponentials sum to 1 without them."""
    x, dy = np.array([[0.5, -np.inf, 2.0, -np.inf]]), make([[1.0, 0.0, -0.5, 0.0]])
    logs, cache = F.log_softmax_forward(make(x))
    assert_close(np.exp(to_np(logs)), ref.softmax(x))
    assert not np.exp(to_np(logs))[np.isneginf(x)].any()
    assert_close(to_np(F.log_softmax_backward(dy, cache).x), ref.log_softmax_gradient(to_np(dy), x))
    _, cache = F.softmax_forward(make(x))
    assert_close(to_np(F.softmax_backward(dy, cache).x), ref.softmax_gradient(to_np(dy), x))


@pytest.mark.parametrize("report", ["pytorch-73205", "pytorch-69339"])
def test_smoothed_labels_of_an_ignored_sample(report, make, to_np):
    """A row of zeros as probabilities is ignored: no part of the smoothing reaches the loss or a gradient."""
    logits = np.array([[1.0, 2.0], [3.0, 0.4]])
    shares = np.array([[0.0, 0.0], [0.1, 0.9]])
    weight = np.array([0.2, 0.3]) if report == "pytorch-69339" else np.ones(2)
    for reduction in ("sum", "none"):
        given = make(logits), make(shares)
        loss, cache = F.cross_entropy_forward(*given, weight=make(weight), reduction=reduction)
        rows = -(shares * weight * ref.log_softmax(logits)).sum(axis=-1)
        assert_close(to_np(loss), rows if reduction == "none" else rows.sum())
        dlogits = to_np(F.cross_entropy_backward(make(np.ones(loss.shape)), cache).logits)
        assert not dlogits[0].any()
        assert_close(dlogits[1], ref.softmax(logits[1]) * (shares[1] * weight).sum() - shares[1] * weight)


@pytest.mark.parametrize("report", ["pytorch-72056", "pytorch-91383"])
def test_class_weights_and_ignored_labels(report, make, to_np):
    """A label to ignore that is no class is never looked up among the weights."""
    ignored, weight = (-1, [1.0, 16.0]) if report == "pytorch-72056" else (-100, [1.0, 1.0])
    logits, labels = RNG.standard_normal((4, 2)), np.array([0, ignored, 1, 0])
    options = {"ignore_index": ignored, "weight": np.array(weight)}
    loss, cache = F.cross_entropy_forward(
        make(logits), make(labels, "int64"), ignore_index=ignored, weight=make(weight)
    )  # fmt: skip
    assert_close(to_np(loss), ref.cross_entropy(logits, labels, **options))
    dlogits = F.cross_entropy_backward(make(1.0), cache).logits
    assert_close(to_np(dlogits), ref.cross_entropy_gradient(1.0, logits, labels, **options))


@pytest.mark.parametrize("report", ["pytorch-116349", "pytorch-70348"])
def test_all_labels_ignored(report, make, to_np):
    """The sum is 0, the mean of nothing is NaN, and no gradient is NaN."""
    logits, labels = make(RNG.standard_normal((5, 10))), make(np.full(5, -100), "int64")
    weight = make(np.ones(10)) if report == "pytorch-70348" else None
    for reduction, want in (("sum", 0.0), ("mean", np.nan)):
        loss, cache = F.cross_entropy_forward(logits, labels, weight=weight, ignore_index=-100, reduction=reduction)
        np.testing.assert_array_equal(to_np(loss), want)
        grads = F.cross_entropy_backward(make(1.0), cache)
        assert not to_np(grads.logits).any()
        assert weight is None or not to_np(grads.weight).any()


@pytest.mark.needs("values")
def test_pytorch_12670_a_label_that_is_no_class(make):
    """Label −4, where −1 is the one to ignore, is an error and no result of whatever lies there."""
    with pytest.raises(pa.ArgumentError, match="labels"):
        F.cross_entropy(make(np.zeros((3, 5))), make([0, 1, -4], "int64"), ignore_index=-1)


def test_optax_1335_ignored_integers_and_rows_of_zeros(make, to_np):
    """Labels to ignore and probabilities of zero give the same gradients, and each row its own."""
    logits, labels = RNG.standard_normal((5, 4)), np.array([0, -1, 3, -1, 2])
    shares = np.where(labels[:, None] == np.arange(4), 1.0, 0.0)
    results = []
    for given, options in ((make(labels, "int64"), {"ignore_index": -1}), (make(shares), {})):
        _, cache = F.cross_entropy_forward(make(logits), given, reduction="none", **options)
        results.append(to_np(F.cross_entropy_backward(make(np.arange(1.0, 6.0)), cache).logits))
    assert_close(results[0], results[1])
    assert not results[0][[1, 3]].any()
    assert results[0][[0, 2, 4]].any(axis=1).all()


@pytest.mark.parametrize("report", ["optax-896", "optax-1762"])
def test_impossible_classes_in_a_loss(report, make, to_np):
    """A class of logit −∞ and probability 0: 0 · ∞ is 0 in the loss, and in the gradients of both arguments."""
    logits = np.array([[-np.inf, 0.0, 0.0], [1.0, -np.inf, -np.inf]])
    shares = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    loss, cache = F.cross_entropy_forward(make(logits), make(shares), reduction="none")
    assert_close(to_np(loss), [np.log(2.0), 0.0])
    grads = F.cross_entropy_backward(make([1.0, 1.0]), cache)
    if report == "optax-896":
        assert_close(to_np(grads.logits), [[0.0, -0.5, 0.5], [0.0, 0.0, 0.0]])
    else:
        assert_close(to_np(grads.labels), [[0.0, np.log(2.0), np.log(2.0)], [0.0, 0.0, 0.0]])
