"""A kernel's forward and backward as JAX differentiates them.

The backward is linear in dout and dlse, and its transpose is the forward's tangents, which are written by hand as it
is (``polyattn.backend.attention_tangents``). JAX goes through either in both directions, and keeps no scores. Only a
second derivative taken in reverse, of the backward itself, goes through the generic kernel as JAX differentiates it.
Of the row statistics only the sum, the log-sum-exp, has derivatives: they stand at the second of the two, and the
largest score counts as a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from polyattn.backend import Array, Problem, RowStatistics, Tangents, TiledKernel, attention_tangents

from ._differentiable import moving
from ._linear import Linear, linear

__all__ = ["Passes"]

GENERIC: Any = TiledKernel()
Inputs = tuple[dict[str, Any], Array, Array, Array, Array, RowStatistics]
"""The arrays of the problem by their names, q, k, v, out and the row statistics."""


class Passes:
    """Both passes of a kernel, which is an object or a module, for the problems that share what is static of them."""

    def __init__(self, kernel: Any, static: tuple[tuple[str, Any], ...]) -> None:
        self._kernel, self._static = kernel, dict(static)

    def forward(self, arrays: dict[str, Any], q: Array, k: Array, v: Array) -> tuple[Array, RowStatistics]:
        """Return ``(out, statistics)``; ``arrays`` are those of the problem by their names."""

        @jax.custom_jvp  # type: ignore[untyped-decorator]  # JAX is Any to the type checker
        def run(arrays: dict[str, Any], q: Array, k: Array, v: Array) -> tuple[Array, RowStatistics]:
            out, statistics = self._kernel.forward(q, k, v, self._problem(arrays))
            return out, statistics

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            out, statistics = self.forward(*primals)
            out_dot, lse_dot = self._tangents((*primals, out, statistics), moving(_by_name(*tangents)))
            moved = RowStatistics(jnp.zeros_like(statistics.largest), lse_dot)
            return (out, statistics), (out_dot, moved)

        run.defjvp(jvp, symbolic_zeros=True)
        out, statistics = run(arrays, q, k, v)
        return out, statistics

    def backward(
        self, arrays: dict[str, Any], dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
        statistics: RowStatistics,
    ) -> tuple[Array | None, ...]:  # fmt: skip
        """Return the gradients of q, k, v, bias and sinks."""
        grads = self._gradients((arrays, q, k, v, out, statistics), dout, dlse)
        return tuple(grads.get(name) for name in Tangents._fields)

    def _tangents(self, inputs: Inputs, moved: dict[str, Array]) -> tuple[Array, Array]:
        """Return the tangents of out and lse, linear in ``moved``."""
        names = tuple(moved)
        residuals, tree = jax.tree.flatten(inputs)

        def apply(residuals: Sequence[Array], values: Sequence[Array]) -> tuple[Array, Array]:
            arrays, q, k, v, out, statistics = tree.unflatten(residuals)
            tangents = Tangents(**dict(zip(names, values, strict=True)))
            found = attention_tangents(q, k, v, tangents, out, statistics, self._problem(arrays))
            return found.out_dot.astype(out.dtype), found.lse_dot.astype(statistics.log_total.dtype)

        def transpose(residuals: Sequence[Array], upstream: Sequence[Array | None]) -> tuple[Array, ...]:
            inputs = tree.unflatten(residuals)
            dout, dlse = upstream
            grads = self._gradients(inputs, jnp.zeros_like(inputs[-2]) if dout is None else dout, dlse)
            return tuple(grads[name] for name in names)

        out_dot, lse_dot = linear(
            Linear(apply, transpose), residuals, tuple(moved.values()), (inputs[-2], inputs[-1].log_total)
        )
        return out_dot, lse_dot

    def _gradients(self, inputs: Inputs, dout: Array, dlse: Array | None) -> dict[str, Array]:
        """Return the gradients by name, linear in dout and dlse."""
        residuals, tree = jax.tree.flatten(inputs)
        like = {name: x for name, x in _by_name(*inputs[:4]).items() if x is not None}
        names, upstream = tuple(like), (dout,) if dlse is None else (dout, dlse)
        given = len(upstream)

        def apply(residuals: Sequence[Array], upstream: Sequence[Array]) -> tuple[Array, ...]:
            arrays, *others = tree.unflatten(residuals)
            grads = self._run_backward(arrays, *(*upstream, None)[:2], *others)
            return tuple(dx for dx in grads if dx is not None)

        def transpose(residuals: Sequence[Array], moved: Sequence[Array | None]) -> tuple[Array, ...]:
            named = {name: x for name, x in zip(names, moved, strict=True) if x is not None}
            return self._tangents(tree.unflatten(residuals), named)[:given]

        grads = linear(Linear(apply, transpose), residuals, upstream, tuple(like.values()))
        return dict(zip(names, grads, strict=True))

    def _run_backward(self, arrays: dict[str, Any], *operands: Array | None) -> Any:
        def generic(arrays: dict[str, Any], *operands: Array | None) -> Any:
            return GENERIC.backward(*operands, self._problem(arrays))

        if isinstance(self._kernel, TiledKernel):
            return generic(arrays, *operands)

        @jax.custom_jvp  # type: ignore[untyped-decorator]
        def run(arrays: dict[str, Any], *operands: Array | None) -> Any:
            return self._kernel.backward(*operands, self._problem(arrays))

        # JAX does not differentiate a loop of computed length in reverse.
        run.defjvp(lambda primals, tangents: jax.jvp(generic, primals, tangents))
        return run(arrays, *operands)

    def _problem(self, arrays: dict[str, Any]) -> Problem:
        return Problem(**self._static, **arrays)


def _by_name(arrays: dict[str, Any], q: Any, k: Any, v: Any) -> dict[str, Any]:
    """Return what has a gradient, or what belongs to it; of a bias with structure that is its table."""
    bias = arrays["table"] if "table" in arrays else arrays.get("bias")
    return dict(zip(Tangents._fields, (q, k, v, bias, arrays.get("sinks")), strict=True))
