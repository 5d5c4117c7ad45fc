"""A kernel's forward and backward as JAX differentiates them.

The backward is linear in dout and dlse, and its transpose is the forward's tangents, which are written by hand as it
is (``polyattn.backend.attention_tangents``). JAX goes through either in both directions, and keeps no scores. Only a
second derivative taken in reverse, of the backward itself, goes through the generic kernel as JAX differentiates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp

from polyattn.backend import Array, Problem, Tangents, TiledKernel, attention_tangents

from ._differentiable import moving
from ._linear import Linear, linear

__all__ = ["Passes"]

GENERIC: Any = TiledKernel()
Inputs = tuple[dict[str, Any], Array, Array, Array, Array, Array]
"""The arrays of the problem by their names, q, k, v, out and lse."""


class Passes:
    """Both passes of a kernel, which is an object or a module, for the problems that share what is static of them."""

    def __init__(self, kernel: Any, static: tuple[tuple[str, Any], ...]) -> None:
        self._kernel, self._static = kernel, dict(static)

    def forward(self, arrays: dict[str, Any], q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        """Return ``(out, lse)``; ``arrays`` are those of the problem by their names."""

        @jax.custom_jvp  # type: ignore[untyped-decorator]  # JAX is Any to the type checker
        def run(arrays: dict[str, Any], q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out, lse = self._kernel.forward(q, k, v, self._problem(arrays))
            return out, lse

        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            out, lse = self.forward(*primals)
            return (out, lse), self._tangents((*primals, out, lse), moving(_by_name(*tangents)))

        run.defjvp(jvp, symbolic_zeros=True)
        out, lse = run(arrays, q, k, v)
        return out, lse

    def backward(
        self, arrays: dict[str, Any], dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
        lse: Array,
    ) -> tuple[Array | None, ...]:  # fmt: skip
        """Return the gradients of q, k, v, bias and sinks."""
        grads = self._gradients((arrays, q, k, v, out, lse), dout, dlse)
        return tuple(grads.get(name) for name in Tangents._fields)

    def _tangents(self, inputs: Inputs, moved: dict[str, Array]) -> tuple[Array, Array]:
        """Return the tangents of out and lse, linear in ``moved``."""
        names = tuple(moved)
        residuals, tree = jax.tree.flatten(inputs)

        def apply(residuals: Sequence[Array], values: Sequence[Array]) -> tuple[Array, Array]:
            arrays, q, k, v, out, lse = tree.unflatten(residuals)
            tangents = Tangents(**dict(zip(names, values, strict=True)))
            found = attention_tangents(q, k, v, tangents, out, lse, self._problem(arrays))
            return found.out_dot.astype(out.dtype), found.lse_dot.astype(lse.dtype)

        def transpose(residuals: Sequence[Array], upstream: Sequence[Array | None]) -> tuple[Array, ...]:
            inputs = tree.unflatten(residuals)
            dout, dlse = upstream
            grads = self._gradients(inputs, jnp.zeros_like(inputs[-2]) if dout is None else dout, dlse)
            return tuple(grads[name] for name in names)

        out_dot, lse_dot = linear(Linear(apply, transpose), residuals, tuple(moved.values()), inputs[-2:])
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
