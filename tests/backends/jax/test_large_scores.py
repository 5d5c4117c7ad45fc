"""Huge scores in compiled programs, where XLA may contract the product with the scale and a difference into one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import references as ref

Q, K, V = (np.random.default_rng(i).standard_normal((1, 2, 4, 8)).astype(np.float32) for i in range(3))


@pytest.mark.parametrize("kernel", ["native", "scan", "direct", "jit", "tiled", "plain"])
@pytest.mark.parametrize("size", [1e6, 1e10, 1e20, 1e30])
@pytest.mark.parametrize("bias", [False, True])
def test_every_kernel(kernel, size, bias):
    given = {"bias": np.ones((4, 4), dtype=np.float32)} if bias else {}

    def loss(q, k, v):
        return jnp.sum(pa.attention(q, k, v, kernel=kernel, **{name: jnp.asarray(x) for name, x in given.items()}))

    try:
        value, grads = jax.jit(jax.value_and_grad(loss, argnums=2))(jnp.asarray(Q * size), K, V)
    except pa.KernelUnsupportedError:
        assert kernel in ("scan", "direct", "native")
        return
    answer = ref.attention(Q * size, K, V, **given)
    slopes = ref.attention_gradients(np.ones_like(V), Q * size, K, V, **given)
    np.testing.assert_allclose(value, np.sum(answer.out), rtol=1e-4)
    np.testing.assert_allclose(grads, slopes.v, atol=1e-4)
