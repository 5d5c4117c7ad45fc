"""Products in which an excluded entry counts for nothing, whatever stands there.

A weight that a mask excludes is exactly zero, but zero times NaN or infinity is
NaN. So where something is excluded and an operand is not finite, the product is
taken over its finite entries, and the others are put back where they are not
excluded: nothing leaks from an excluded key, and no genuine NaN is hidden.
"""

from __future__ import annotations

import math
from typing import Any

from ._arrays import Array


def matmul_excluding(backend: Any, a: Array, b: Array, allowed: Array | None) -> Array:
    """Return ``a @ b`` over the pairs that are allowed.

    ``a (…, m, n)`` is zero wherever ``allowed`` (broadcastable to it) is False;
    what stands in row j of ``b (…, n, d)`` does not reach row i of the result
    unless ``allowed[i, j]``.
    """
    xp = backend.namespace()
    if allowed is None:
        return xp.matmul(a, b)
    return backend.cond(
        xp.isfinite(xp.sum(b)),  # one pass over b, a fraction of the product's cost
        lambda: xp.matmul(a, b),
        lambda: _isolated(xp, a, b, xp.broadcast_to(allowed, a.shape)),
    )


def _isolated(xp: Any, a: Array, b: Array, allowed: Array) -> Array:
    def reaches(rows: Array, entries: Array) -> Array:
        return xp.matmul(xp.astype(rows, b.dtype), xp.astype(entries, b.dtype))

    zero, plus, minus = xp.zeros_like(b), xp.equal(b, math.inf), xp.equal(b, -math.inf)
    total = xp.matmul(a, xp.where(xp.isfinite(b), b, zero))
    above, below = xp.greater(a, 0), xp.less(a, 0)  # never where excluded
    neither = xp.logical_and(allowed, xp.equal(a, 0))
    to_plus = xp.greater(reaches(above, plus) + reaches(below, minus), 0)
    to_minus = xp.greater(reaches(above, minus) + reaches(below, plus), 0)
    to_nan = xp.greater(reaches(allowed, xp.isnan(b)) + reaches(neither, xp.logical_or(plus, minus)), 0)
    total = xp.where(to_plus, total + math.inf, total)
    total = xp.where(to_minus, total - math.inf, total)  # inf - inf is NaN, as in the plain sum
    return xp.where(to_nan, xp.full_like(total, math.nan), total)
