"""The ends of the dtypes where no values can be looked at: in a trace; and the second derivatives of the formulas."""

import functools

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.references import _exact

F = pa.functional
ROWS = np.array([[1.0, -0.7, 0.4, 0.9], [0.6, 0.5, -0.9, 0.2]])
DY = np.array([[0.3, 0.8, -0.6, 0.1], [-0.9, 0.4, 0.2, 0.7]])
SCALES = ((1e-36, 0.0), (2e19, 1e-5), (2e38, 1e-5))


def norm_of(name, scale, eps):
    """Return x, dy and the exact y and dx in float32; dy is such that dx is of the size of 1."""
    x, dy = np.float32(ROWS * scale), np.float32(DY * min(scale, 1e38))
    one = _exact.exact(np.ones(4))
    arrays = _exact.exact(dy), _exact.exact(x), one
    y, dx, _ = _exact.exactly(_exact.norm_and_gradients, *arrays, eps, name == "layer_norm")
    return x, dy, y.astype(np.float64), dx.astype(np.float64)


def traces_of_jax(function):
    import jax

    def value_and_gradient(x, dy):
        y, pull = jax.vjp(function, x)
        return y, pull(dy)[0]

    return jax.jit(value_and_gradient), jax.vmap(value_and_gradient)


def traces_of_torch(function):
    import torch

    compiled = torch.compile(function, backend="eager", fullgraph=True)

    def value_and_gradient(x, dy):
        y, pull = torch.func.vjp(function, x)
        return y, pull(dy)[0]

    def by_compiled(x, dy):
        y = compiled(x.requires_grad_())
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    return value_and_gradient, torch.func.vmap(value_and_gradient), by_compiled


@pytest.mark.needs("autograd")
@pytest.mark.parametrize(("scale", "eps"), SCALES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what torch's compiler does
def test_norms_in_a_trace(target, make, to_np, name, scale, eps):
    x, dy, want_y, want_dx = norm_of(name, scale, eps)
    traces = {"jax": traces_of_jax, "torch": traces_of_torch}[target.name]
    for traced in traces(lambda x: getattr(F, name)(x, eps=eps)):
        y, dx = traced(make(x, "float32"), make(dy, "float32"))
        assert_close(to_np(y), want_y, "float32")
        assert_close(to_np(dx), want_dx, "float32")


def second_derivatives(target, function, x):
    """Return d/dx of the sum of f′(x) by the library's own differentiation of our backward."""
    if target.name == "jax":
        import jax

        return jax.grad(lambda x: jax.grad(lambda x: function(x).sum())(x).sum())(x)
    import torch

    x.requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.sum(), x)[0]


@pytest.mark.needs("autograd")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_second_derivatives_of_activations(target, make, to_np, dtype):
    """At 0, where the formulas change from one side to the other, and far out, where each factor has its end."""
    x = np.array([-3e38, -1e4, -200.0, -1.0, 0.0, 1.0, 200.0, 1e4, 3e38])
    bell = np.exp(-np.minimum(x * x, 1e4) / 2) / np.sqrt(2 * np.pi)
    half = np.clip(x, -1e3, 1e3) / 2
    sigma = 1 / (1 + np.exp(-np.maximum(2 * half, -700)))
    curve = sigma * (1 - sigma)
    wants = {
        "gelu": np.where(np.abs(x) > 100, 0, bell * (2 - np.minimum(x * x, 1e4))),
        "silu": curve * (2 + 2 * half * (1 - 2 * sigma)),
    }
    for name, want in wants.items():
        got = to_np(second_derivatives(target, getattr(F, name), make(x, dtype)))
        assert_close(got, want, dtype, what=name)
    slope_at_0 = to_np(second_derivatives(target, lambda x: F.gelu(x, approximate="tanh"), make(x, dtype)))
    assert np.isfinite(slope_at_0).all()
    assert_close(slope_at_0[4], np.sqrt(2 / np.pi), dtype, what="gelu by tanh")

    def gated(name, x):
        return getattr(F, name)(x, make(np.ones(9), dtype))

    for name in ("swiglu", "geglu"):
        got = to_np(second_derivatives(target, functools.partial(gated, name), make(x, dtype)))
        assert_close(got, wants["silu" if name == "swiglu" else "gelu"], dtype, what=name)


@pytest.mark.needs("autograd")
@pytest.mark.parametrize("scale", [1e-10, 1.0, 1e10])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_second_derivatives_of_norms(target, make, to_np, name, scale):
    """A norm without eps does not depend on the scale: its second derivative is scale⁻² times that at 1."""

    def curved(x):
        return getattr(F, name)(x, eps=0.0) ** 3

    want = to_np(second_derivatives(target, curved, make(ROWS, "float64")))
    got = to_np(second_derivatives(target, curved, make(np.float32(ROWS * scale), "float32")))
    assert_close(np.float64(got) * scale**2, want, "float32", scale=10.0)


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "silu", "gelu", "gelu_tanh"])
def test_exact_formulas(name):
    """They agree with the plain float64 formulas in the middle."""
    x, dy, weight = ROWS, DY, np.array([0.9, -0.5, 1.0, 0.4])
    if name.endswith("norm"):
        arrays = (_exact.exact(a) for a in (dy, x, weight))
        got = _exact.exactly(_exact.norm_and_gradients, *arrays, 1e-5, name == "layer_norm")
        want = getattr(ref, name)(x, weight), *getattr(ref, f"{name}_gradients")(dy, x, weight)[:2]
    else:
        function, *more = name.split("_")
        pairs = [_exact.exactly(getattr(_exact, f"{name}_and_slope"), a) for a in _exact.exact(3 * x).ravel()]
        got = (np.array(side).reshape(x.shape) for side in zip(*pairs, strict=True))
        want = (
            getattr(ref, function)(3 * x, *more),
            getattr(ref, f"{function}_gradient")(np.ones(x.shape), 3 * x, *more),
        )
    for exact, plain in zip(got, want, strict=True):
        assert_close(exact.astype(np.float64), plain)
