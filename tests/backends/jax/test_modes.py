"""JAX: 32-bit mode, and traced arrays."""

import jax
import numpy as np
import pytest

import polyattn as pa
from polyattn import functional as F


@pytest.mark.parametrize("name", ["jax_32_bits", "jax_integer_argument"])
def test_thirty_two_bits(name, program):
    """float64 is a DTypeError that says how to enable it; integers that fit are narrowed, which is a transfer."""
    program(name, PYTHONWARNINGS="error", JAX_PLATFORMS="cpu")


def test_traced_arguments_stay():
    """A traced mask beside concrete arrays is of the same library, so it computes; it does not leave either."""
    x, mask = jax.numpy.ones((3, 4)), np.tri(3, dtype=bool)
    compiled = jax.jit(lambda mask: pa.attention(x, x, x, mask=mask))
    np.testing.assert_allclose(compiled(mask), pa.attention(x, x, x, mask=jax.numpy.asarray(mask)))
    with pytest.raises(pa.BackendMismatchError, match="mask: this array is being traced"):
        jax.jit(lambda mask: pa.attention(x, x, x, mask=mask, backend="numpy"))(mask)


def test_a_cache_crosses_jit_with_its_place():
    x = jax.numpy.linspace(0.0, 1.0, 12).reshape(3, 4)
    y, cache = jax.jit(lambda t: F.softmax_forward(t))(x)
    (dx,) = jax.jit(F.softmax_backward)(jax.numpy.ones_like(y), cache)
    assert cache.place.backend.name == "jax"
    np.testing.assert_allclose(dx, np.zeros((3, 4)), atol=1e-7)


def test_a_new_seed_compiles_nothing():
    """A training step has a seed of its own each time; the mask is still that of the other libraries."""
    from polyattn_jax import _kernel

    x = np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float32)
    before = _kernel._compiled.cache_info().misses
    for seed in (1, 2, -7):
        out = pa.attention(x, x, x, dropout=0.5, seed=seed, backend="jax")
        assert np.allclose(out, pa.attention(x, x, x, dropout=0.5, seed=seed), atol=1e-6)
    assert _kernel._compiled.cache_info().misses - before <= 1
