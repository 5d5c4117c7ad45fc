"""A JAX primitive for a linear function with a given transpose.

JAX differentiates a ``custom_vjp`` in reverse mode only. It differentiates a ``custom_jvp`` in both modes if its
tangents are computed by such a primitive: forward mode applies the function, and reverse mode calls the transpose,
which may be written by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from polyattn.backend import Array

__all__ = ["Linear", "linear"]

Arrays = tuple[Array, ...]


class Linear(NamedTuple):
    """A function that is linear in its operands, not necessarily in its residuals, and its transpose.

    ``apply(residuals, operands)`` returns the results. ``transpose(residuals, cotangents)`` takes a cotangent of each
    result, None for zero, and returns the cotangents of the operands.
    """

    apply: Callable[[Arrays, Arrays], Arrays]
    transpose: Callable[[Arrays, tuple[Array | None, ...]], Arrays]


def linear(
    function: Linear, residuals: Sequence[Array], operands: Sequence[Array], like: Sequence[Array]
) -> Sequence[Array]:
    """Return ``function.apply(residuals, operands)``, arrays with the shapes and dtypes of ``like``."""
    results = tuple(jax.typeof(x).strip_weak_type() for x in like)
    found: Sequence[Array] = _call.bind(
        *residuals, *operands, function=function, residuals=len(residuals), results=results
    )
    return found


_call = Primitive("polyattn_linear")
_call.multiple_results = True


def _apply(*arrays: Array, function: Linear, residuals: int, results: Any) -> Sequence[Array]:
    return list(function.apply(arrays[:residuals], arrays[residuals:]))


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Any], *, function: Linear, residuals: int, results: Any
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Add the tangents by operands, to which the function itself applies, and by residuals, which JAX computes."""
    call = functools.partial(_call.bind, function=function, residuals=residuals, results=results)
    kept, operands = tuple(primals[:residuals]), tuple(primals[residuals:])
    moving = [i for i, t in enumerate(tangents[:residuals]) if type(t) is not ad.Zero]
    parts = []
    if any(type(t) is not ad.Zero for t in tangents[residuals:]):
        parts.append(call(*kept, *map(ad.instantiate_zeros, tangents[residuals:])))
    if moving:

        def at(*values: Array) -> Arrays:
            there = dict(zip(moving, values, strict=True))
            return tuple(function.apply(tuple(there.get(i, x) for i, x in enumerate(kept)), operands))

        parts.append(jax.jvp(at, tuple(kept[i] for i in moving), tuple(tangents[i] for i in moving))[1])
    return call(*primals), [functools.reduce(jnp.add, column) for column in zip(*parts, strict=True)]


def _transpose(
    cotangents: Sequence[Any], *arrays: Any, function: Linear, residuals: int, results: Any
) -> list[Array | None]:
    given = tuple(None if type(ct) is ad.Zero else ct for ct in cotangents)
    grads = function.transpose(arrays[:residuals], given)
    wanted = [dx if ad.is_undefined_primal(x) else None for dx, x in zip(grads, arrays[residuals:], strict=True)]
    return [*(None for _ in range(residuals)), *wanted]


def _batch(
    arrays: Sequence[Array], axes: Sequence[int | None], *, function: Linear, residuals: int, results: Any
) -> tuple[Sequence[Array], Sequence[int]]:
    """Map function and transpose over a new first axis of all operands and of the mapped residuals."""
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)

    def lead(x: Array, axis: int | None) -> Array:
        return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)

    pairs = list(zip(arrays, axes, strict=True))
    kept = [x if axis is None else lead(x, axis) for x, axis in pairs[:residuals]]
    in_axes = (tuple(None if axis is None else 0 for _, axis in pairs[:residuals]), 0)
    wider = jax.make_jaxpr(lambda *xs: [lead(x, None) for x in xs])(*results).out_avals
    mapped = Linear(jax.vmap(function.apply, in_axes), jax.vmap(function.transpose, in_axes))
    found = _call.bind(
        *kept, *(lead(x, axis) for x, axis in pairs[residuals:]), function=mapped, residuals=residuals,
        results=tuple(aval.strip_weak_type() for aval in wider),
    )  # fmt: skip
    return found, [0] * len(found)


_call.def_impl(_apply)
_call.def_abstract_eval(lambda *arrays, function, residuals, results: list(results))
mlir.register_lowering(_call, mlir.lower_fun(_apply, multiple_results=True))
ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose
batching.primitive_batchers[_call] = _batch
