"""A write at a traced position that XLA executes once and in place."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax

from polyattn.backend import Array

from ._placed import alike

__all__ = ["write"]


def write(x: Array, value: Array, start: Array, axis: int) -> Array:
    """Return ``x`` with ``value`` written at ``start``; the memory of a donated ``x`` is reused.

    On the CPU, XLA treats a write as cheap and repeats it for each use of its result, each on a copy of ``x`` (jaxlib
    0.10: a decoding step takes ten times as long). It does not repeat a loop of unknown length.
    """
    x, value, start = alike(x, value, start)
    return lax.platform_dependent(
        x, value, start, cpu=functools.partial(_written_once, axis), default=functools.partial(_written, axis)
    )


def _written(axis: int, x: Array, value: Array, start: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(x, value, start, axis)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _written_once(axis: int, x: Array, value: Array, start: Array) -> Array:
    once = lax.select(start >= 0, np.int32(1), np.int32(0))
    return lax.fori_loop(np.int32(0), once, lambda _, y: _written(axis, y, value, start), x)


@_written_once.defjvp  # type: ignore[untyped-decorator]  # JAX is Any to the type checker
def _written_once_jvp(axis: int, primals: Any, tangents: Any) -> Any:
    """Differentiate the plain write: JAX has no reverse mode for a loop with a computed length."""
    return jax.jvp(functools.partial(_written, axis), primals, tangents)
