"""An operation with its derivatives for JAX: reverse mode by our backward, forward mode by its transpose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from polyattn.backend import Array, KernelUnsupportedError, flatten

from ._linear import Linear, linear

__all__ = ["differentiable", "moving"]


def differentiable(
    forward: Callable[..., tuple[Array, Any]], backward: Callable[[Array, Any], tuple[Any, ...]]
) -> Callable[..., Array]:
    """Return ``op`` with ``y = op(*arrays)``, as :meth:`polyattn.backend.Backend.differentiable` defines it."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]  # JAX is Any to the type checker
    def op(*arrays: Array | None) -> Array:
        return forward(*arrays)[0]

    def jvp(primals: Sequence[Array | None], tangents: Sequence[Any]) -> tuple[Array, Array]:
        y, saved = _evaluated(forward, primals)
        residuals, structure = flatten(saved)
        moved = moving(dict(enumerate(tangents)))
        like = {i: jax.ShapeDtypeStruct(t.shape, t.dtype) for i, t in moved.items()}

        def transpose(residuals: Sequence[Array], dy: Sequence[Array]) -> tuple[Array, ...]:
            grads = backward(dy[0], structure.build(residuals))
            return tuple(jnp.zeros_like(x) if grads[i] is None else grads[i] for i, x in like.items())

        tangent = linear(transposed(transpose, y), residuals, tuple(moved.values()), (y,))
        return y, tangent[0]

    op.defjvp(jvp, symbolic_zeros=True)
    return op  # type: ignore[no-any-return]  # JAX is Any to the type checker


def _evaluated(forward: Callable[..., Any], primals: Sequence[Array | None]) -> Any:
    """Run a forward; with concrete arrays, outside JAX's partial evaluation, which would double the time."""
    traced = any(isinstance(x, jax.core.Tracer) for x in primals)
    with contextlib.nullcontext() if traced else jax.core.eval_context():
        return forward(*primals)


def moving(tangents: dict[Any, Any]) -> dict[Any, Array]:
    """Return the tangents that are neither None nor known to be zero."""
    return {name: t for name, t in tangents.items() if t is not None and not isinstance(t, SymbolicZero)}


def transposed(transpose: Callable[..., tuple[Array, ...]], y: Array) -> Linear:
    """Return the linear function with this transpose and one result like ``y``: JAX transposes the transpose."""
    like = jax.typeof(y).strip_weak_type()

    def apply(residuals: Sequence[Array], operands: Sequence[Array]) -> tuple[Array, ...]:
        try:
            found: tuple[Array, ...] = jax.linear_transpose(lambda dy: transpose(residuals, (dy,)), like)(operands)
        except AssertionError as error:  # a cond whose predicate depends on dy
            raise KernelUnsupportedError(
                "kernel: expected one that supports forward mode on JAX, got one whose backward depends on the values "
                "of the upstream gradient; kernel='jit' computes the same with tangents"
            ) from error
        return found

    return Linear(apply, transpose)
