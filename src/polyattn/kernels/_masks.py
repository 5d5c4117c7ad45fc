"""Which query may attend to which key: every excluding argument of a problem as one boolean array."""

from __future__ import annotations

import math
from typing import Any

from ._arrays import Array, dtype_name
from ._problem import Problem

LIMIT = 2**30  # positions are int32, which every library computes with; sums of two of these still fit


def allowed(problem: Problem) -> Array | None:
    """Return True where a query may attend, None where nothing is excluded.

    The array has at least two axes, and broadcasts to ``(…, H, n_q, n_k)``.
    """
    xp, (n_q, n_k) = problem.xp, (problem.sizes.n_q, problem.sizes.n_k)
    conditions = []
    if problem.mask is not None:
        conditions.append(problem.mask)
    if problem.bias is not None:
        conditions.append(xp.not_equal(problem.bias, -math.inf))
    key = xp.arange(n_k, dtype=xp.int32, device=problem.native_device)[None, :]  # (1, n_k)
    if problem.key_lengths is not None:
        conditions.append(xp.less(key, _per_batch(problem, problem.key_lengths)))
    left, right = problem.window
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    if left is not None or right is not None:
        row = xp.arange(n_q, dtype=xp.int32, device=problem.native_device)[:, None]  # (n_q, 1)
        query = xp.add(row, _per_batch(problem, problem.q_offset))  # (…, 1, n_q, 1)
        if right is not None:
            conditions.append(xp.less_equal(key, xp.add(query, _scalar(problem, right))))
        if left is not None:
            conditions.append(xp.greater_equal(key, xp.subtract(query, _scalar(problem, left))))
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


def _scalar(problem: Problem, value: int) -> Array:
    clipped = max(-LIMIT, min(LIMIT, value))
    return problem.xp.asarray(clipped, dtype=problem.xp.int32, device=problem.native_device)


def _per_batch(problem: Problem, value: int | Array) -> Array:
    """Return an integer, or integers over the batch axes, as an int32 array that broadcasts against the scores."""
    if isinstance(value, int):
        return _scalar(problem, value)
    xp: Any = problem.xp
    if dtype_name(value.dtype) in ("int64", "uint64", "uint32"):
        value = xp.clip(value, None if dtype_name(value.dtype)[0] == "u" else -LIMIT, LIMIT)
    return xp.astype(value, xp.int32)[..., None, None, None]  # (…, 1, 1, 1)
