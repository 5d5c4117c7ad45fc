"""The placement of JAX arrays: over the devices of a mesh, and inside ``shard_map`` the mesh axes of variation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from polyattn.backend import Array, BackendMismatchError

__all__ = ["alike", "branched", "replaced", "settled", "spread", "types_of"]


def spread(**arrays: Array) -> bool:
    """Return whether XLA partitions any of these arrays among devices, as it does outside ``shard_map``.

    Raises
    ------
    BackendMismatchError
        If a type has an explicit sharding, which the loops over tiles do not support.
    """
    found = False
    for name, x in arrays.items():
        if not isinstance(x, jax.core.Tracer) and isinstance(x.sharding, jax.sharding.SingleDeviceSharding):
            continue
        sharding: Any = getattr(jax.typeof(x), "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if mesh is None or mesh.empty or mesh.size == 1:
            continue
        kinds = jax.sharding.AxisType
        if kinds.Explicit in mesh.axis_types and any(axes is not None for axes in sharding.spec):
            raise BackendMismatchError(
                f"{name}: expected an array on one device, on a mesh with automatic axes or in jax.shard_map, got one "
                f"with the explicit sharding {sharding.spec}; call attention in jax.shard_map, or make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto, …)"
            )
        found = found or any(kind != kinds.Manual for kind in mesh.axis_types)
    return found


def alike(*arrays: Array | None) -> list[Array | None]:
    """Inside ``shard_map``, mark each array as varying along every mesh axis along which any of them varies.

    JAX's check requires it: the carry of a loop must not change from replicated to varying. The gradient of a
    replicated array is then summed over the devices.
    """
    axes = [frozenset() if x is None else _varying(x) for x in arrays]
    every: frozenset[Any] = frozenset().union(*axes)
    return [x if x is None else _vary(x, every - mine) for x, mine in zip(arrays, axes, strict=True)]


def replaced(valid: Array, results: tuple[Array, ...], otherwise: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return the results if they are valid, else the others, of the same types.

    The loop has no step or one. XLA reuses the memory of its initial values; of the results of a condition it makes
    copies.
    """

    def step(carry: Any) -> Any:
        like = (valid, *results)
        found = (jnp.ones((), bool), *otherwise())
        return tuple(_vary(y, _varying(x) - _varying(y)) for x, y in zip(like, found, strict=True))

    _, *found = jax.lax.while_loop(lambda carry: ~carry[0], step, (valid, *results))
    return tuple(found)


def types_of(shapes: Sequence[tuple[tuple[int, ...], Any]], like: Sequence[Array]) -> tuple[Any, ...]:
    """Return the types of arrays; inside ``shard_map``, varying along every mesh axis along which any array varies."""
    axes: frozenset[Any] = frozenset().union(*map(_varying, like))
    types = jax.make_jaxpr(lambda: [_vary(jnp.zeros(*x), axes) for x in shapes])().out_avals
    return tuple(x.strip_weak_type() for x in types)


def settled(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any) -> Any:
    """Return the initial carry of a loop; inside ``shard_map``, varying along the axes of the carry after one step."""
    if not _in_shard_map():
        return carry
    found: list[frozenset[Any]] = []

    def step(carry: Any) -> Any:
        result, _ = body(carry, jnp.asarray(0))
        found.extend(map(_varying, jax.tree.leaves(result)))
        return result

    jax.eval_shape(step, carry)
    leaves, tree = jax.tree.flatten(carry)
    return tree.unflatten([_vary(x, axes - _varying(x)) for x, axes in zip(leaves, found, strict=True)])


def branched(predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
    """Run ``lax.cond``; inside ``shard_map``, mark the results of both branches as varying along the same axes."""
    if not _in_shard_map():
        return jax.lax.cond(predicate, if_true, if_false)
    found: list[list[frozenset[Any]]] = []

    def seen(branch: Callable[[], Any]) -> Any:
        result = branch()
        found.append([_varying(x) for x in jax.tree.leaves(result)])
        return result

    for branch in (if_true, if_false):
        jax.eval_shape(lambda branch=branch: seen(branch))
    every = [a | b for a, b in zip(*found, strict=True)]

    def varied(branch: Callable[[], Any]) -> Any:
        leaves, tree = jax.tree.flatten(branch())
        return tree.unflatten([_vary(x, axes - _varying(x)) for x, axes in zip(leaves, every, strict=True)])

    return jax.lax.cond(predicate, lambda: varied(if_true), lambda: varied(if_false))


def _in_shard_map() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and jax.sharding.AxisType.Manual in mesh.axis_types


def _varying(x: Array) -> frozenset[Any]:
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)  # JAX ≥ 0.10; older versions have ``vma`` or neither
    found = getattr(aval, "vma", frozenset()) if kind is None else kind.varying
    return frozenset(found)


def _vary(x: Array, axes: frozenset[Any]) -> Array:
    if not axes:
        return x
    return jax.lax.pcast(x, tuple(axes), to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(x, tuple(axes))
