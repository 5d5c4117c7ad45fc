"""JAX: its own attention, compiled, forward and with its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array
from ._case import Case
from ._contestant import Contestant, Peer, Results

__all__ = ["JaxAttention"]


class JaxAttention(Peer):
    """``jax.jit`` of ``jax.nn.dot_product_attention``, in its own layout (batch, n, heads, d)."""

    name = "jax"
    library = extra = "jax"
    dtypes = ("float16", "bfloat16", "float32")  # given float64 it takes the softmax in float32
    devices = ("cpu", "cuda")

    def unsuited(self, case: Case, device: str) -> str | None:
        """Ask for the device too, which has to be JAX's."""
        import jax

        if device != "cpu" and all(d.platform != "gpu" for d in jax.devices()):
            return "jax has no such device here"
        return super().unsuited(case, device)

    def scores_held(self, case: Case) -> int:
        """Count what XLA keeps of the plain formula, which its attention is outside CUDA; measured."""
        return 2 if case.what == "forward" else 6

    def contestant(self, case: Case, device: str, threads: int) -> Contestant:
        """Compile for the shapes of the case."""
        import jax

        kind, _, index = device.partition(":")
        there = jax.devices("gpu" if kind == "cuda" else kind)[int(index or 0)]
        inputs = [
            jax.device_put(jax.numpy.asarray(np.swapaxes(x, 1, 2), dtype=case.dtype), there)
            for x in case.inputs().values()
        ]
        jax.block_until_ready(inputs)
        call = jax.jit(_forward(case) if case.what == "forward" else _both(case)).lower(*inputs).compile()

        def run() -> dict[str, Array]:
            results: dict[str, Array] = jax.block_until_ready(call(*inputs))
            return results

        def fetch(results: dict[str, Array]) -> Results:
            return {name: np.swapaxes(np.asarray(x, dtype=np.float32), 1, 2) for name, x in results.items()}

        return Contestant(run, fetch)


def _forward(case: Case) -> Any:
    import jax

    def forward(q: Array, k: Array, v: Array, dout: Array) -> dict[str, Array]:
        return {"out": jax.nn.dot_product_attention(q, k, v, is_causal=case.causal)}

    return forward


def _both(case: Case) -> Any:
    import jax

    def both(q: Array, k: Array, v: Array, dout: Array) -> dict[str, Array]:
        def attention(*operands: Array) -> Array:
            return jax.nn.dot_product_attention(*operands, is_causal=case.causal)

        out, pullback = jax.vjp(attention, q, k, v)
        dq, dk, dv = pullback(dout)
        return {"out": out, "dq": dq, "dk": dk, "dv": dv}

    return both
