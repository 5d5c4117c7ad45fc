"""Classes whose logit is −inf, through the derivatives of torch and JAX: as without them, and none is NaN."""

import numpy as np
import pytest

from polyattn import functional as F

RNG = np.random.default_rng(29)
ROWS, CLASSES, KEPT = 3, 5, [0, 2, 3]
X, Z, U, W = RNG.standard_normal((ROWS, CLASSES)), *RNG.standard_normal((2, ROWS, CLASSES)), RNG.random(CLASSES) + 0.5
LABELS = np.array([2, 0, 1])  # among the classes that are kept
INF = np.where(np.isin(np.arange(CLASSES), KEPT), 0.0, -np.inf)

# Functions of two arrays of logits and a weight to a number. ``there`` takes the classes that are there, of a result
# that is −inf at the others.
FUNCTIONS = {
    "softmax": lambda x, z, w, labels, there: (F.softmax(x) * F.softmax(z)).sum(),
    "log_softmax": lambda x, z, w, labels, there: (there(F.log_softmax(x)) * there(F.softmax(z))).sum(),
    "labels": lambda x, z, w, labels, there: F.cross_entropy(x, labels) * F.softmax(z)[0, 0],
    "labels, weight": lambda x, z, w, labels, there: F.cross_entropy(x, labels, weight=w),
    "labels, sum": lambda x, z, w, labels, there: F.cross_entropy(x, labels, weight=w, reduction="sum") ** 2,
    "probabilities": lambda x, z, w, labels, there: F.cross_entropy(x, F.softmax(z)),
    "probabilities, weight": lambda x, z, w, labels, there: F.cross_entropy(x, F.softmax(z), weight=w),
    "probabilities, none": lambda x, z, w, labels, there: (
        F.cross_entropy(x, F.softmax(z), reduction="none") ** 2
    ).sum(),
}


def results(name, library, everywhere, derivatives):
    """Return the derivatives of a function with the classes left out, −inf or not there at all, on the host."""
    x, z, u, w = (a if everywhere else a[..., KEPT] for a in (X, Z, U, W))
    inf = INF if everywhere else INF[KEPT]
    labels = library(np.array(KEPT)[LABELS] if everywhere else LABELS)
    picked = library(np.array(KEPT))

    def function(pair, weight):
        x, z = (part + library(inf) for part in (pair[:ROWS], pair[ROWS:]))
        return FUNCTIONS[name](x, z, weight, labels, (lambda y: y[:, picked]) if everywhere else lambda y: y)

    return derivatives(function, library(np.concatenate([x, z])), library(w), library(np.concatenate([u, u * u])))


def compared(name, library, derivatives):
    whole, part = (results(name, library, everywhere, derivatives) for everywhere in (True, False))
    assert whole.keys() == part.keys()
    for what in whole:
        got, want = np.asarray(whole[what]), np.asarray(part[what])
        for axis, n in enumerate(got.shape):
            if n == CLASSES:
                left_out = np.delete(got, KEPT, axis=axis)
                np.testing.assert_array_equal(left_out, np.zeros_like(left_out), err_msg=f"{what}: left out")
                got = np.take(got, KEPT, axis=axis)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-11, err_msg=what)


def by_jax(f, pair, weight, along):
    import jax

    def value(pair, weight):
        return f(pair, weight)

    def all_of_them(pair, weight, along):
        gradient = jax.grad(value, argnums=(0, 1))
        zeros = jax.numpy.zeros_like(pair), jax.numpy.zeros_like(weight)
        moved = jax.jvp(value, (pair, weight), (along, weight))[1]
        still = jax.jvp(value, (pair, weight), zeros)[1]
        of_pair, of_weight = gradient(pair, weight)
        forward_over_reverse = jax.jvp(gradient, (pair, weight), (along, weight))[1]
        reverse = jax.grad(
            lambda p, w: jax.numpy.vdot(gradient(p, w)[0], along) + jax.numpy.vdot(gradient(p, w)[1], weight),
            argnums=(0, 1),
        )(pair, weight)
        return {
            "value": value(pair, weight), "tangent": moved, "tangent of nothing": still, "gradient": of_pair,
            "gradient of weight": of_weight, "forward over reverse": forward_over_reverse[0],
            "forward over reverse of weight": forward_over_reverse[1], "hessian": jax.hessian(value)(pair, weight),
        } | dict(zip(("reverse over reverse", "reverse over reverse of weight"), reverse, strict=True))  # fmt: skip

    found = jax.jit(all_of_them)(pair, weight, along)
    assert found["tangent of nothing"] == 0.0
    return found


def by_torch(f, pair, weight, along):
    import torch

    pair, weight = pair.requires_grad_(), weight.requires_grad_()
    value = f(pair, weight)
    gradients = torch.autograd.grad(value, (pair, weight), create_graph=True, materialize_grads=True)
    product = (gradients[0] * along).sum() + (gradients[1] * weight.detach()).sum()
    second = torch.autograd.grad(product, (pair, weight), materialize_grads=True)
    found = dict(zip(("gradient", "of weight", "second", "second of weight"), (*gradients, *second), strict=True))
    found |= {"value": value, "once": torch.autograd.grad(f(pair, weight), pair)[0]}
    fixed = weight.detach()
    found["tangent"] = torch.func.jvp(lambda p: f(p, fixed), (pair.detach(),), (along,))[1]
    found["tangent of nothing"] = torch.func.jvp(lambda p: f(p, fixed), (pair.detach(),), (along * 0,))[1]
    assert found["tangent of nothing"] == 0.0
    return {what: x.detach().numpy() for what, x in found.items()}


@pytest.mark.needs("autograd")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's forward mode uses it itself
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(target, name):
    compared(name, target.xp.asarray, {"jax": by_jax, "torch": by_torch}[target.name])
