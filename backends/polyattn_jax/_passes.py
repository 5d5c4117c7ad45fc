"""The forward and backward of a kernel with their derivatives for JAX.

The backward is linear in dout and dlse. Its transpose computes the tangents of the forward, and both are written by
hand (``polyattn.backend.attention_tangents``). So JAX differentiates both in both modes and stores no scores. Only
for a reverse-mode derivative of the backward with respect to its residuals, JAX differentiates the generic kernel.
Only the sum of the two row statistics, the log-sum-exp, has derivatives: they are assigned to the second one, and the
largest score counts as a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from polyattn.backend import Array, Problem, RowStatistics, Structure, Tangents, TiledKernel, attention_tangents

from ._differentiable import moving
from ._linear import Linear, linear

__all__ = ["Passes"]

GENERIC: Any = TiledKernel()
Arrays = tuple[Any, ...]
"""The arrays of a flattened problem."""
Inputs = tuple[Arrays, Array, Array, Array, Array, RowStatistics]
"""The arrays of the problem, q, k, v, out and the row statistics."""


class Passes:
    """Forward and backward of a kernel, which is an object or a module, for problems of one structure."""

    def __init__(self, kernel: Any, structure: Structure) -> None:
        self._kernel, self._structure = kernel, structure

    def forward(self, arrays: Arrays, q: Array, k: Array, v: Array) -> tuple[Array, RowStatistics]:
        """Return ``(out, statistics)``; ``arrays`` holds the arrays of the problem."""

        @jax.custom_jvp  # type: ignore[untyped-decorator]  # JAX is Any to the type checker
        def run(arrays: Arrays, q: Array, k: Array, v: Array) -> tuple[Array, RowStatistics]:
            out, statistics = self._kernel.forward(q, k, v, self._problem(arrays))
            return out, statistics

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            out, statistics = self.forward(*primals)
            out_dot, lse_dot = self._tangents((*primals, out, statistics), moving(self._by_name(*tangents)))
            moved = RowStatistics(jnp.zeros_like(statistics.largest), lse_dot)
            return (out, statistics), (out_dot, moved)

        run.defjvp(jvp, symbolic_zeros=True)
        out, statistics = run(arrays, q, k, v)
        return out, statistics

    def backward(
        self, arrays: Arrays, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
        statistics: RowStatistics,
    ) -> tuple[Array | None, ...]:  # fmt: skip
        """Return the gradients of q, k, v, bias and sinks."""
        grads = self._gradients((arrays, q, k, v, out, statistics), dout, dlse)
        return tuple(grads.get(name) for name in Tangents._fields)

    def _tangents(self, inputs: Inputs, moved: dict[str, Array]) -> tuple[Array, Array]:
        """Return the tangents of out and lse, linear in the tangents ``moved``."""
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
        like = {name: x for name, x in self._by_name(*inputs[:4]).items() if x is not None}
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

    def _run_backward(self, arrays: Arrays, *operands: Array | None) -> Any:
        def generic(arrays: Arrays, *operands: Array | None) -> Any:
            return GENERIC.backward(*operands, self._problem(arrays))

        if isinstance(self._kernel, TiledKernel):
            return generic(arrays, *operands)

        @jax.custom_jvp  # type: ignore[untyped-decorator]  # JAX is Any to the type checker
        def run(arrays: Arrays, *operands: Array | None) -> Any:
            return self._kernel.backward(*operands, self._problem(arrays))

        # JAX has no reverse mode for a loop with a computed length.
        run.defjvp(lambda primals, tangents: jax.jvp(generic, primals, tangents))
        return run(arrays, *operands)

    def _problem(self, arrays: Arrays) -> Problem:
        problem: Problem = self._structure.build(arrays)
        return problem

    def _by_name(self, arrays: Arrays, q: Any, k: Any, v: Any) -> dict[str, Any]:
        """Return the inputs with a gradient, or their tangents, by name; for a structured bias, its table."""
        problem = self._problem(arrays)
        return dict(zip(Tangents._fields, (q, k, v, problem.bias_array, problem.sinks), strict=True))
