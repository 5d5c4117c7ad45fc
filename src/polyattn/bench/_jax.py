"""JAX: ``jax.jit`` of ``jax.nn.dot_product_attention``, in its own layout (batch, n, heads, d)."""

from __future__ import annotations

import numpy as np

from ..backend import Array
from ..errors import BackendUnavailableError
from ._case import Case
from ._contestant import Contestant, contestant, index_of

__all__ = ["prepared"]


def prepared(case: Case, device: str, threads: int) -> Contestant:
    """Prepare JAX's attention, compiled for the shapes of the case."""
    import jax

    try:
        there = jax.devices("cpu" if device == "cpu" else "gpu")[index_of(device)]
    except (RuntimeError, IndexError):
        raise BackendUnavailableError("jax has no such device here") from None

    def attention(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=case.causal)

    def call(q: Array, k: Array, v: Array, dout: Array) -> dict[str, Array]:
        if case.what == "forward":
            return {"out": attention(q, k, v)}
        out, pullback = jax.vjp(attention, q, k, v)
        return {"out": out, **dict(zip(("dq", "dk", "dv"), pullback(dout), strict=True))}

    inputs = {
        name: jax.device_put(jax.numpy.asarray(np.swapaxes(x, 1, 2), dtype=case.dtype), there)
        for name, x in case.inputs().items()
    }
    jax.block_until_ready(inputs)
    compiled = jax.jit(call).lower(**inputs).compile()
    return contestant(
        compiled, inputs, lambda x: np.swapaxes(np.asarray(x, dtype=np.float32), 1, 2), jax.block_until_ready
    )
