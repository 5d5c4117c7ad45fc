"""An operation as JAX differentiates it: in reverse through our own backward, forward through what transposes that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from polyattn.backend import Array, flatten

from ._linear import Linear, linear

__all__ = ["differentiable", "moving"]


def differentiable(
    forward: Callable[..., tuple[Array, Any]], backward: Callable[[Array, Any], tuple[Any, ...]]
) -> Callable[..., Array]:
    """Return ``y = op(*arrays)``, as :meth:`polyattn.backend.Backend.differentiable` has it."""

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
    return op  # type: ignore[no-any-return]


def _evaluated(forward: Callable[..., Any], primals: Sequence[Array | None]) -> Any:
    """Run a forward; where its arrays have values past JAX's partial evaluation, which takes as long again as it."""
    traced = any(isinstance(x, jax.core.Tracer) for x in primals)
    with contextlib.nullcontext() if traced else jax.core.eval_context():
        return forward(*primals)


def moving(tangents: dict[Any, Any]) -> dict[Any, Array]:
    """Return the tangents that there are, of what is there and is not known to stand still."""
    return {name: t for name, t in tangents.items() if t is not None and not isinstance(t, SymbolicZero)}


def transposed(transpose: Callable[..., tuple[Array, ...]], y: Array) -> Linear:
    """Return the function to one array like ``y`` whose transpose this is, which JAX finds by transposing it again."""
    like = jax.typeof(y).strip_weak_type()

    def apply(residuals: Sequence[Array], operands: Sequence[Array]) -> tuple[Array, ...]:
        found: tuple[Array, ...] = jax.linear_transpose(lambda dy: transpose(residuals, (dy,)), like)(operands)
        return found

    return Linear(apply, transpose)
