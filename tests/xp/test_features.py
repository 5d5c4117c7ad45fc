"""The features that plugins declare for their library's transformations, checked with attention."""

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.features import lacking

pytestmark = [
    pytest.mark.needs("autograd"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # torch's forward mode uses it itself
]
Q, K, V, DOUT, U = np.random.default_rng(71).standard_normal((5, 2, 5, 4))


def by_torch(name):
    import torch

    q, k, v, dout, u = map(torch.tensor, (Q, K, V, DOUT, U))

    def loss(q, k, v, dout):
        return (pa.attention(q, k, v, causal=True) * dout).sum()

    gradient = torch.func.grad(loss)
    if name == "vmap":
        return torch.func.vmap(gradient)(q, k, v, dout)
    if name == "forward_mode":
        return torch.func.jvp(lambda q: pa.attention(q, k, v, causal=True), (q,), (u,))[1]
    return torch.func.grad(lambda q: (gradient(q, k, v, dout) * u).sum())(q)


def by_jax(name):
    import jax

    q, k, v, dout, u = map(jax.numpy.asarray, (Q, K, V, DOUT, U))

    def loss(q, k, v, dout):
        return (pa.attention(q, k, v, causal=True) * dout).sum()

    gradient = jax.grad(loss)
    if name == "vmap":
        return jax.vmap(gradient)(q, k, v, dout)
    if name == "forward_mode":
        return jax.jvp(lambda q: pa.attention(q, k, v, causal=True), (q,), (u,))[1]
    return jax.grad(lambda q: (gradient(q, k, v, dout) * u).sum())(q)


WAYS = {"torch": by_torch, "jax": by_jax}
WANTED = {
    "vmap": lambda: ref.attention_gradients(DOUT, Q, K, V, causal=True).q,
    "forward_mode": lambda: pa.attention_jvp(Q, K, V, (U,), causal=True)[1],
    "second_order": lambda: pa.attention_backward_vjp((U,), DOUT, pa.attention_forward(Q, K, V, causal=True)[1]).q,
}


@pytest.mark.parametrize("name", WANTED)
def test_what_is_said_is_so(name, target):
    """A transformation that is declared lacking but works fails the test, as an expected failure that passes does."""
    if not lacking(target, name):
        assert_close(np.asarray(WAYS[target.name](name)), WANTED[name]())
        return
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
        WAYS[target.name](name)
