"""Softmax, linear, the norms, the activations and the gated units: values, gradients, dtypes, shapes."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(11)
X, DX = RNG.standard_normal((2, 4, 6)), RNG.standard_normal((2, 4, 6))
WEIGHT, BIAS, DY = RNG.standard_normal((6, 3)), RNG.standard_normal(3), RNG.standard_normal((2, 4, 3))
GAIN, SHIFT = RNG.standard_normal(6), RNG.standard_normal(6)
GAINS, SHIFTS = RNG.standard_normal((4, 6)), RNG.standard_normal((4, 6))


def gradients(name: Any, dy: Any, arguments: Any, **options: Any) -> Any:
    """Return ``(y, gradients)`` of an operation through its forward and backward."""
    y, cache = getattr(F, f"{name}_forward")(*arguments, **options)
    return y, getattr(F, f"{name}_backward")(dy, cache)


# Each operation as (name, arguments, options, upstream, the reference of the value, the reference of the gradients).
OPERATIONS: dict[str, Any] = {
    "softmax": ("softmax", (X,), {}, DX, ref.softmax, lambda dy, x: (ref.softmax_gradient(dy, x),)),
    "softmax-axis": (
        *("softmax", (X,), {"axis": 1}, DX),
        *(lambda x: ref.softmax(x, 1), lambda dy, x: (ref.softmax_gradient(dy, x, 1),)),
    ),
    "linear": (
        *("linear", (X, WEIGHT, BIAS), {}, DY),
        *(ref.linear, lambda dy, x, w, b: ref.linear_gradients(dy, x, w)),
    ),
    "linear-no-bias": (
        *("linear", (X, WEIGHT), {}, DY),
        *(ref.linear, lambda dy, x, w: ref.linear_gradients(dy, x, w)[:2]),
    ),
    "linear-one-row": (
        *("linear", (X[0, 0], WEIGHT, BIAS), {}, DY[0, 0]),
        *(ref.linear, lambda dy, x, w, b: ref.linear_gradients(dy, x, w)),
    ),
    "layer_norm": (
        *("layer_norm", (X, GAIN, SHIFT), {}, DX),
        *(ref.layer_norm, lambda dy, x, w, b: ref.layer_norm_gradients(dy, x, w)),
    ),
    "layer_norm-bare": (
        *("layer_norm", (X,), {"eps": 1e-3}, DX),
        *(lambda x: ref.layer_norm(x, eps=1e-3), lambda dy, x: ref.layer_norm_gradients(dy, x, eps=1e-3)[:1]),
    ),
    "layer_norm-gain": (
        *("layer_norm", (X, GAIN), {}, DX),
        *(ref.layer_norm, lambda dy, x, w: ref.layer_norm_gradients(dy, x, w)[:2]),
    ),
    "layer_norm-two-axes": (
        *("layer_norm", (X, GAINS, SHIFTS), {"axes": 2}, DX),
        *(
            lambda x, w, b: ref.layer_norm(x, w, b, axes=2),
            lambda dy, x, w, b: ref.layer_norm_gradients(dy, x, w, axes=2),
        ),
    ),
    "layer_norm-every-axis": (
        *("layer_norm", (X,), {"axes": 3}, DX),
        *(lambda x: ref.layer_norm(x, axes=3), lambda dy, x: ref.layer_norm_gradients(dy, x, axes=3)[:1]),
    ),
    "rms_norm": ("rms_norm", (X, GAIN), {}, DX, ref.rms_norm, ref.rms_norm_gradients),
    "rms_norm-bare": (
        *("rms_norm", (X,), {"eps": 1e-3}, DX),
        *(lambda x: ref.rms_norm(x, eps=1e-3), lambda dy, x: ref.rms_norm_gradients(dy, x, eps=1e-3)[:1]),
    ),
    "rms_norm-two-axes": (
        *("rms_norm", (X, GAINS), {"axes": 2}, DX),
        *(lambda x, w: ref.rms_norm(x, w, axes=2), lambda dy, x, w: ref.rms_norm_gradients(dy, x, w, axes=2)),
    ),
    "log_softmax": ("log_softmax", (X,), {}, DX, ref.log_softmax, lambda dy, x: (ref.log_softmax_gradient(dy, x),)),
    "log_softmax-axis": (
        *("log_softmax", (X,), {"axis": 1}, DX),
        *(lambda x: ref.log_softmax(x, 1), lambda dy, x: (ref.log_softmax_gradient(dy, x, 1),)),
    ),
    "silu": ("silu", (3 * X,), {}, DX, ref.silu, lambda dy, x: (ref.silu_gradient(dy, x),)),
    "swiglu": ("swiglu", (3 * X, X[::-1]), {}, DX, ref.swiglu, ref.swiglu_gradients),
    "geglu": ("geglu", (3 * X, X[::-1]), {}, DX, ref.geglu, ref.geglu_gradients),
    "geglu-tanh": (
        *("geglu", (3 * X, X[::-1]), {"approximate": "tanh"}, DX),
        *(lambda g, u: ref.geglu(g, u, "tanh"), lambda dy, g, u: ref.geglu_gradients(dy, g, u, "tanh")),
    ),
    "relu": ("relu", (X,), {}, DX, ref.relu, lambda dy, x: (ref.relu_gradient(dy, x),)),
    "gelu": ("gelu", (3 * X,), {}, DX, ref.gelu, lambda dy, x: (ref.gelu_gradient(dy, x),)),
    "gelu-tanh": (
        *("gelu", (3 * X,), {"approximate": "tanh"}, DX),
        *(lambda x: ref.gelu(x, "tanh"), lambda dy, x: (ref.gelu_gradient(dy, x, "tanh"),)),
    ),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_value_and_gradients(make: Any, to_np: Any, dtype: Any, case: Any) -> None:
    name, arguments, options, upstream, value, slopes = OPERATIONS[case]
    native = [make(x, dtype) for x in (*arguments, upstream)]
    *held, dy_held = (to_np(x).astype(np.float64) for x in native)
    y, grads = gradients(name, native[-1], native[:-1], **options)
    assert type(y) is type(native[0])
    assert y.dtype == native[0].dtype
    assert_close(to_np(y), value(*held), dtype, what="y")
    assert_close(to_np(getattr(F, name)(*native[:-1], **options)), value(*held), dtype, what="y of the short form")
    given = [gradient for gradient in grads if gradient is not None]
    expected = slopes(dy_held, *held)
    assert len(given) == len(arguments)
    for field, gradient, want in zip(grads._fields, given, expected, strict=False):
        assert type(gradient) is type(native[0])
        assert gradient.dtype == native[0].dtype
        assert_close(to_np(gradient), want, dtype, what=f"gradient of {field}")


@pytest.mark.parametrize("case", OPERATIONS)
def test_central_differences(make: Any, to_np: Any, case: Any) -> None:
    name, arguments, options, upstream, *_ = OPERATIONS[case]

    def loss(*hosts: Any) -> Any:
        return float(np.sum(to_np(getattr(F, name)(*(make(x) for x in hosts), **options)) * upstream))

    _, grads = gradients(name, make(upstream), [make(x) for x in arguments], **options)
    slopes_agree(loss, arguments, [to_np(gradient) for gradient in grads if gradient is not None])


@pytest.mark.parametrize("case", OPERATIONS)
def test_inputs_are_left_alone(make: Any, to_np: Any, case: Any) -> None:
    name, arguments, options, upstream, *_ = OPERATIONS[case]
    native = [make(x) for x in (*arguments, upstream)]
    gradients(name, native[-1], native[:-1], **options)
    for x, host in zip(native, (*arguments, upstream), strict=True):
        np.testing.assert_array_equal(to_np(x), host)


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_arrays_without_axes(make: Any, to_np: Any, name: Any) -> None:
    x, dy = make(0.7), make(1.5)
    y, (dx,) = gradients(name, dy, [x])
    assert type(y) is type(dx) is type(getattr(F, name)(x)) is type(x)
    assert_close(to_np(y), getattr(ref, name)(0.7))
    assert_close(to_np(dx), getattr(ref, f"{name}_gradient")(1.5, 0.7))


def test_softmax_of_large_and_excluded(make: Any, to_np: Any) -> None:
    x = np.array([[1e4, 1e4 - 1.0, -1e4], [-np.inf, 0.0, -np.inf]])
    assert_close(to_np(F.softmax(make(x))), ref.softmax(x))


def test_relu_keeps_nan_and_has_no_slope_at_zero(make: Any, to_np: Any) -> None:
    y, (dx,) = gradients("relu", make([1.0, 1.0, 1.0]), [make([0.0, -1.0, 2.0])])
    np.testing.assert_array_equal(to_np(y), [0.0, 0.0, 2.0])
    np.testing.assert_array_equal(to_np(dx), [0.0, 0.0, 1.0])
    assert np.isnan(to_np(F.relu(make([np.nan]))))[0]


def test_gelu_far_out(make: Any, to_np: Any) -> None:
    x = np.array([-40.0, -9.0, -6.0, 0.0, 6.0, 9.0, 40.0])
    for approximate in ("none", "tanh"):
        y, (dx,) = gradients("gelu", make(np.ones(7)), [make(x)], approximate=approximate)
        assert_close(to_np(y), ref.gelu(x, approximate))
        assert_close(to_np(dx), ref.gelu_gradient(np.ones(7), x, approximate))


def test_layer_norm_of_a_large_mean(make: Any, to_np: Any) -> None:
    """Float32 rows 10⁴ + i·10⁻³: the norm of the rounded inputs is accurate to 1e-3."""
    x = make(1e4 + np.arange(128.0).reshape(1, -1) * 1e-3, "float32")
    expected = ref.layer_norm(to_np(x))
    assert np.max(np.abs(to_np(F.layer_norm(x)) - expected)) <= 1e-3


@pytest.mark.parametrize("mean", [1e4, -1e6])
def test_layer_norm_subtracts_the_rounding_of_the_mean(make: Any, to_np: Any, mean: Any) -> None:
    """The mean of float32 numbers far from zero is rounded; the difference is not lost."""
    x = make(mean + np.random.default_rng(3).standard_normal((4, 5)), "float32")
    assert_close(to_np(F.layer_norm(x, eps=0.0)), ref.layer_norm(to_np(x).astype(np.float64), eps=0.0), "float32")


def test_layer_norm_in_low_precision(make: Any, to_np: Any, dtype: Any) -> None:
    """Case 13: the square of ±300 overflows float16; a constant row gives exactly the bias, with gradient zero."""
    x = make(np.tile([300.0, -300.0], 64)[None], dtype)
    assert np.max(np.abs(to_np(F.layer_norm(x)) - np.tile([1.0, -1.0], 64))) <= 1e-5
    constant, shift = make(np.full((2, 8), 5.0), dtype), make(np.linspace(-1, 1, 8), dtype)
    y, grads = gradients(
        "layer_norm", make(np.ones((2, 8)), dtype), [constant, make(np.ones(8), dtype), shift], eps=1e-8
    )
    np.testing.assert_array_equal(to_np(y), np.broadcast_to(to_np(shift), (2, 8)))
    np.testing.assert_array_equal(to_np(grads.x), np.zeros((2, 8)))


def test_long_sums_are_taken_wider(make: Any, to_np: Any, dtype: Any) -> None:
    """The sum of 4096 ones in float16 would stop at 2048, in bfloat16 at 256."""
    x, dy = make(np.ones((4096, 2)), dtype), make(np.ones((4096, 1)), dtype)
    _, grads = gradients("linear", dy, [x, make(np.ones((2, 1)), dtype), make(np.zeros(1), dtype)])
    assert grads.bias.dtype == dy.dtype
    np.testing.assert_array_equal(to_np(grads.bias), [4096.0])
    np.testing.assert_array_equal(to_np(grads.weight), [[4096.0], [4096.0]])
    scale, shift = make(np.ones(2), dtype), make(np.zeros(2), dtype)
    _, norm = gradients("layer_norm", make(np.ones((4096, 2)), dtype), [x, scale, shift])
    np.testing.assert_array_equal(to_np(norm.bias), [4096.0, 4096.0])
    _, norm = gradients("rms_norm", make(np.ones((4096, 2)), dtype), [x, scale], eps=0.0)
    np.testing.assert_array_equal(to_np(norm.weight), [4096.0, 4096.0])


@pytest.mark.parametrize("shape", [(0, 6), (2, 0, 6)])
def test_empty_batches(make: Any, to_np: Any, shape: Any) -> None:
    x = make(np.zeros(shape))
    for name, others, width in (
        ("softmax", (), 6),
        ("log_softmax", (), 6),
        ("layer_norm", (GAIN, SHIFT), 6),
        ("rms_norm", (GAIN,), 6),
        ("linear", (WEIGHT, BIAS), 3),
    ):
        dy = make(np.zeros((*shape[:-1], width)))
        y, grads = gradients(name, dy, [x, *(make(other) for other in others)])
        assert tuple(y.shape) == (*shape[:-1], width)
        assert tuple(grads[0].shape) == shape
        for gradient, other in zip(grads[1:], others, strict=True):
            np.testing.assert_array_equal(to_np(gradient), np.zeros(other.shape))


def test_views_equal_their_copies(make: Any, to_np: Any, xp: Any) -> None:
    """Case 11: an innermost axis that is not contiguous."""
    wide = np.random.default_rng(2).standard_normal((6, 2, 8))
    for view in (
        xp.permute_dims(make(wide[..., :4]), (1, 2, 0)),
        xp.flip(make(np.ascontiguousarray(wide.transpose(1, 2, 0)[:, :4])), axis=-1),
        make(np.ascontiguousarray(wide.transpose(1, 2, 0).repeat(2, -1)[:, :4]))[..., ::2],
    ):
        host = to_np(view)
        y, (dx,) = gradients("softmax", view, [view])
        assert_close(to_np(y), ref.softmax(host))
        assert_close(to_np(dx), ref.softmax_gradient(host, host))
        y, grads = gradients("layer_norm", view, [view, make(GAIN), make(SHIFT)])
        assert_close(to_np(y), ref.layer_norm(host, GAIN, SHIFT))
        assert_close(to_np(grads.x), ref.layer_norm_gradients(host, host, GAIN)[0])
        assert_close(to_np(F.linear(view, make(WEIGHT), make(BIAS))), ref.linear(host, WEIGHT, BIAS))
