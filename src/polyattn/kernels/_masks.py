"""The boolean array of allowed pairs: all arguments of a problem that exclude pairs, combined."""

from __future__ import annotations

import math
from typing import Any

from ._arrays import Array, cast, dtype_name
from ._problem import Problem
from ._static import concrete
from ._structure import StructuredBias, mask_pairs

LIMIT = 2**29  # positions are int32, which every library supports; a sum of three such values fits in int32


def allowed(problem: Problem) -> Array | None:
    """Return an array that is True where a query may attend, or None if no pair is excluded.

    The array has at least two axes, and broadcasts to ``(…, H, n_q, n_k)``.
    """
    xp, (n_q, n_k) = problem.xp, (problem.sizes.n_q, problem.sizes.n_k)
    conditions: list[Array] = []
    bias = problem.bias
    if problem.mask is not None:
        conditions.append(mask_pairs(problem))
    if isinstance(bias, StructuredBias):
        finite = bias.allowed(problem)
        conditions.extend(() if finite is None else (finite,))
    elif bias is not None:
        conditions.append(xp.not_equal(bias, -math.inf))
    if problem.key_lengths is not None and not (isinstance(problem.key_lengths, int) and problem.key_lengths >= n_k):
        conditions.append(xp.less(_row(problem, n_k), _per_batch(problem, problem.key_lengths)))
    left, right = problem.reach
    if isinstance(problem.q_offset, int):  # no comparison where all keys are in range, as in a decoding step
        right = None if right is not None and n_k - 1 <= problem.q_offset + right else right
        left = None if left is not None and problem.q_offset + n_q - 1 <= left else left
    if left is not None or right is not None:
        ahead = _ahead(problem)  # minus the offset: position of the key − position of the query
        if right is not None:
            most = shifted(problem, problem.q_offset, plus=right, minus=0)
            conditions.append(xp.less_equal(ahead, _per_batch(problem, most)))  # (…, 1, n_q, n_k)
        if left is not None:
            least = shifted(problem, problem.q_offset, plus=0, minus=left)
            conditions.append(xp.greater_equal(ahead, _per_batch(problem, least)))
    if problem.q_segments is not None and problem.k_segments is not None:
        q_ids = problem.q_segments[..., None, :, None]  # (…, 1, n_q, 1)
        k_ids = problem.k_segments[..., None, None, :]  # (…, 1, 1, n_k)
        conditions.append(xp.equal(q_ids, k_ids))
    if not conditions:
        return None
    result = conditions[0]
    for condition in conditions[1:]:
        result = xp.logical_and(result, condition)
    return xp.reshape(result, (*(1,) * (2 - result.ndim), *result.shape)) if result.ndim < 2 else result


def shifted(problem: Problem, value: int | Array, *, plus: int | Array, minus: int | Array) -> int | Array:
    """Return ``value + plus − minus``: an integer if all three are integers, else an int32 array."""
    if isinstance(value, int) and isinstance(plus, int) and isinstance(minus, int):
        return value + plus - minus
    xp: Any = problem.xp
    value, plus, minus = (as_int32(problem, x) for x in (value, plus, minus))
    return xp.subtract(xp.add(value, plus), minus)


def distances(problem: Problem) -> Array:
    """Return position of the key − position of the query, ``(…, 1, n_q, n_k)`` in int32."""
    return problem.xp.subtract(_ahead(problem), _per_batch(problem, problem.q_offset))


def key_positions(problem: Problem) -> Array:
    """Return the positions of the keys in the whole problem, ``(1, n_k)`` in int32."""
    return problem.xp.add(_row(problem, problem.sizes.n_k), as_int32(problem, problem.origin[1]))


def _ahead(problem: Problem) -> Array:
    """Return index of the key − index of the query, ``(n_q, n_k)`` in int32."""
    xp, sizes = problem.xp, problem.sizes
    return xp.subtract(_row(problem, sizes.n_k), xp.matrix_transpose(_row(problem, sizes.n_q)))


def _row(problem: Problem, n: int) -> Array:
    """Return 0, 1, …, n − 1 as ``(1, n)``."""
    return problem.xp.arange(n, dtype=problem.xp.int32, device=problem.native_device)[None, :]


def _scalar(problem: Problem, value: int) -> Array:
    clipped = max(-LIMIT, min(LIMIT, value))
    return problem.xp.asarray(clipped, dtype=problem.xp.int32, device=problem.native_device)


def _per_batch(problem: Problem, value: int | Array) -> Array:
    """Return an integer, or integers over the batch axes, as an int32 array that broadcasts against the scores."""
    return as_int32(problem, value)[..., None, None, None]  # (…, 1, 1, 1)


def as_int32(problem: Problem, value: int | Array) -> Array:
    """Return an integer or integers as an int32 array, clipped to ±``LIMIT``."""
    if isinstance(value, int):
        return _scalar(problem, value)
    xp: Any = problem.xp
    name = dtype_name(value.dtype)
    value = cast(xp, value, xp.int64 if name.endswith("64") else xp.int32)  # torch supports few unsigned operations
    if name in ("uint32", "uint64"):  # the cast made values beyond the signed range negative
        value = xp.where(xp.less(value, 0), xp.full_like(value, LIMIT), value)
    return cast(xp, xp.clip(value, -concrete(LIMIT), concrete(LIMIT)), xp.int32)
