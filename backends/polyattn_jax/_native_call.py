"""One call of the native library for an attention problem: its arguments, its results, and the gradients from these.

All arrays may have mapped axes in front, as ``_native.py`` explains; ``sizes`` are the lengths of these axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from polyattn.backend import Array, Problem, RelativePositionBias, StructuredBias, StructuredMask, dtype_name
from polyattn_native import constants, foreign_call

from ._foreign import call

__all__ = ["by_library", "each"]

LIMIT = 2**38
"""Positions are at most this large for the library."""
AFTER_BATCH = {"q_offset": 0, "key_lengths": 0, "prefix": 0, "q_segments": 1, "k_segments": 1}
"""Integers, which the library takes with 64 bits, and the number of their axes after those of the batch."""

Inputs = dict[str, Any]
Shape = tuple[int, ...]


def by_library(inputs: Inputs, sizes: Shape) -> tuple[tuple[Array, ...], Array]:
    """Return the results of the library, and whether they are valid."""
    problem: Problem = inputs["problem"]
    direction = "backward" if "dout" in inputs else "forward"
    arguments, results = dict(_arguments(inputs, sizes)), dict(_results(inputs, sizes))
    attributes = foreign_call(
        problem, (*sizes, *problem.sizes.batch), dtype_name(arguments["bias"].dtype) if "bias" in arguments else None,
        {name: x.shape[:-1] if name in AFTER_BATCH else x.shape for name, x in arguments.items()},
        {name: shape for name, (shape, _) in results.items()}, backward=direction == "backward",
    )  # fmt: skip
    found, valid = call(direction, list(arguments.values()), results, attributes)
    return tuple(_gradients(found, inputs, sizes) if direction == "backward" else found.values()), valid


def each(function: Callable[..., Any], sizes: Shape, arrays: Sequence[Any]) -> Any:
    """Apply a function at each index of the mapped axes; None is no array."""
    if not sizes:
        return function(*arrays)
    (size, *others), mapped = sizes, [x is not None and x.shape[0] > 1 for x in arrays]
    parts = [x if yes or x is None else x[0] for x, yes in zip(arrays, mapped, strict=True)]
    if any(mapped):
        return jax.vmap(lambda *xs: each(function, tuple(others), xs), [0 if yes else None for yes in mapped])(*parts)
    found = each(function, tuple(others), parts)
    return jax.tree.map(lambda y: jnp.broadcast_to(y, (size, *y.shape)), found)


# ---- arguments -------------------------------------------------------------------------------------------------------


def _arguments(inputs: Inputs, sizes: Shape) -> Iterator[tuple[str, Array]]:
    """Yield the arguments by their field in the library's structure."""
    problem: Problem = inputs["problem"]
    dtype, mapped, axes = _wide(problem), len(sizes), len(problem.sizes.batch)
    for name in ("q", "k", "v", "dout", "out"):
        if name in inputs:
            yield name, _padded(inputs[name], mapped, axes + 3)
    if inputs.get("dlse") is not None:
        yield "dlse", _padded(inputs["dlse"].astype(dtype), mapped, axes + 2)
    for name in ("largest", "log_total"):
        if name in inputs:
            yield name, jnp.broadcast_to(inputs[name].astype(dtype), (*sizes, *problem.sizes.scores[:-1]))
    for name in ("scale", "softcap"):
        if getattr(problem, name) is not None:
            yield name, jnp.asarray(getattr(problem, name)).astype(dtype).reshape(())
    if problem.dropout:
        yield "seed", _seed(problem.seed)
    yield from _masks(problem, mapped)
    yield from _biases(problem, sizes)


def _masks(problem: Problem, mapped: int) -> Iterator[tuple[str, Array]]:
    """Yield all that excludes pairs, and the slopes of ALiBi."""
    axes = len(problem.sizes.batch)
    for name in ("q_offset", "key_lengths", "q_segments", "k_segments"):
        x: Any = getattr(problem, name)
        if not isinstance(x, int | None):
            x = _limited(x) if AFTER_BATCH[name] == 0 else x
            yield name, _halves(_padded(x, mapped, axes + AFTER_BATCH[name]))
    if problem.mask is not None and not isinstance(problem.mask, StructuredMask):
        yield "mask", _padded(problem.mask, mapped, axes + 3)
    for name, constant in constants(problem):
        if name == "slopes":
            yield name, jnp.asarray(constant)
        elif name in AFTER_BATCH:
            yield name, jnp.asarray(_padded(constant, 0, mapped + axes)[..., None].view(np.int32))
        else:
            yield name, jnp.asarray(_padded(constant, 0, mapped + axes + 3))


def _biases(problem: Problem, sizes: Shape) -> Iterator[tuple[str, Array]]:
    """Yield what is added to scores, or is one of them."""
    dtype, mapped, axes = _wide(problem), len(sizes), len(problem.sizes.batch)
    bias: Any = problem.bias
    if problem.sinks is not None:
        yield "sinks", problem.sinks.astype(dtype).reshape(-1)
    if isinstance(bias, RelativePositionBias):
        values = each(lambda *xs: bias.by_distance(_with_table(problem, *xs)), sizes, _table(problem))
        yield "distances", _padded(values.astype(dtype), mapped, axes + 2)
    elif bias is not None and not isinstance(bias, StructuredBias):
        yield "bias", _padded(bias, mapped, axes + 3)


def _table(problem: Problem) -> tuple[Array | None, Array | None]:
    """Return the table of a relative position bias, and the offset of the queries if it is an array."""
    return problem.table, None if isinstance(problem.q_offset, int) else problem.q_offset


def _with_table(problem: Problem, table: Array, q_offset: Array | None) -> Problem:
    return replace(problem, table=table, q_offset=problem.q_offset if q_offset is None else q_offset)


def _padded(x: Any, mapped: int, axes: int) -> Any:
    """Return an array with ``axes`` axes after the mapped ones; missing ones have length 1."""
    return x.reshape((*x.shape[:mapped], *(1,) * (mapped + axes - x.ndim), *x.shape[mapped:]))


def _limited(x: Array) -> Array:
    """Limit positions of 64 bits."""
    if x.dtype.itemsize < 8:
        return x
    return jnp.clip(x, 0 if np.issubdtype(x.dtype, np.unsignedinteger) else -LIMIT, LIMIT)


def _halves(x: Array) -> Array:
    """Return integers as their lower and higher 32 bits, which are 64 bits in memory: JAX may have no int64."""
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(x, np.int32)
    low = x.astype(np.int32)
    unsigned = np.issubdtype(x.dtype, np.unsignedinteger)
    return jnp.stack([low, jnp.zeros_like(low) if unsigned else low >> 31], axis=-1)


def _seed(seed: Any) -> Array:
    """Return the lower and higher 32 bits of a seed."""
    if isinstance(seed, int):
        return jnp.asarray(np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], dtype=np.uint32))
    return _halves(seed.reshape(()))


def _wide(problem: Problem) -> Any:
    return np.dtype("float64" if problem.dtype == "float64" else "float32")


# ---- results ---------------------------------------------------------------------------------------------------------


def _results(inputs: Inputs, sizes: Shape) -> Iterator[tuple[str, tuple[Shape, Any]]]:
    """Yield shapes and dtypes of the results by their field."""
    problem: Problem = inputs["problem"]
    dtype, narrow, of = _wide(problem), inputs["q"].dtype, problem.sizes
    batch, axes = (*sizes, *of.batch), len(problem.sizes.batch)
    if "dout" not in inputs:
        yield "out", ((*batch, of.heads, of.n_q, of.d_v), narrow)
        yield "largest", ((*batch, of.heads, of.n_q), dtype)
        yield "log_total", ((*batch, of.heads, of.n_q), dtype)
        return
    yield "dq", ((*batch, of.heads, of.n_q, of.d_k), narrow)
    yield "dk", ((*batch, of.kv_heads, of.n_k, of.d_k), narrow)
    yield "dv", ((*batch, of.kv_heads, of.n_k, of.d_v), narrow)
    bias: Any = problem.bias
    if isinstance(bias, RelativePositionBias):
        yield "ddistances", ((*batch, of.heads, of.n_q + of.n_k - 1), dtype)
    elif problem.bias_array is not None:
        own = bias.shape[len(sizes) :]
        yield "dbias", ((*sizes, *(1,) * (axes + 3 - len(own)), *own), dtype)
    if problem.sinks is not None:  # one float64 as the sum of two float32
        yield "dsinks", ((*batch, of.heads, 1 if dtype == np.float64 else 2), dtype)


def _gradients(found: dict[str, Array], inputs: Inputs, sizes: Shape) -> Iterator[Array]:
    """Yield the gradients of q, k, v, bias and sinks, in their dtypes, from the results."""
    problem: Problem = inputs["problem"]
    bias: Any = problem.bias
    for name in ("q", "k", "v"):
        yield _summed(found[f"d{name}"], inputs[name], sizes)
    if isinstance(bias, RelativePositionBias):

        def of_table(ddistances: Array, *table: Array) -> Array:
            return bias.table_gradient(ddistances, _with_table(problem, *table))

        yield each(of_table, sizes, (found["ddistances"], *_table(problem)))
    elif problem.bias_array is not None:
        yield _summed(found["dbias"], bias, sizes)
    if problem.sinks is not None:
        yield _summed(jnp.sum(found["dsinks"], axis=-1), problem.sinks, sizes)


def _summed(dx: Array, x: Array, sizes: Shape) -> Array:
    """Return the gradient of ``x``, which was broadcast to the shape of ``dx``, at each index of the mapped axes."""
    own = x.shape[len(sizes) :]
    shape = (*sizes, *(1,) * (dx.ndim - len(sizes) - len(own)), *own)
    axes = tuple(i for i, (n, m) in enumerate(zip(shape, dx.shape, strict=True)) if n != m)
    if axes:
        dx = jnp.sum(dx.astype(np.float32) if dx.dtype.itemsize < 4 else dx, axis=axes)
    return dx.reshape((*sizes, *own)).astype(x.dtype)
