"""Matrix products that ignore the values of excluded entries, NaN and infinity included.

The weight of an excluded pair is exactly zero, but zero times NaN or infinity is
NaN. Where pairs are excluded and an operand is not finite, the product is taken
over the finite entries, and NaN and infinity are then added to the rows that may
attend to them. No NaN of an excluded key reaches the result, and no other NaN is
lost.
"""

from __future__ import annotations

import math
from typing import Any

from ._arrays import Array


def matmul_excluding(backend: Any, a: Array, b: Array, allowed: Array | None) -> Array:
    """Return ``a @ b`` over the pairs that are allowed.

    ``a (…, m, n)`` is zero wherever ``allowed`` (broadcastable to it) is False;
    row j of ``b (…, n, d)`` does not affect row i of the result unless
    ``allowed[i, j]``.
    """
    xp = backend.namespace()
    if allowed is None:
        return xp.matmul(a, b)
    return backend.cond(
        xp.isfinite(xp.sum(b)),  # one pass over b, cheap beside the product
        lambda: xp.matmul(a, b),
        lambda: _isolated(xp, a, b, xp.broadcast_to(allowed, a.shape)),
    )


def _isolated(xp: Any, a: Array, b: Array, allowed: Array) -> Array:
    def reaches(rows: Array, entries: Array) -> Array:
        return xp.matmul(xp.astype(rows, b.dtype), xp.astype(entries, b.dtype))

    zero, plus, minus = xp.zeros_like(b), xp.equal(b, math.inf), xp.equal(b, -math.inf)
    total = xp.matmul(a, xp.where(xp.isfinite(b), b, zero))
    above, below = xp.greater(a, 0), xp.less(a, 0)  # both False where excluded
    neither = xp.logical_and(allowed, xp.equal(a, 0))
    to_plus = xp.greater(reaches(above, plus) + reaches(below, minus), 0)
    to_minus = xp.greater(reaches(above, minus) + reaches(below, plus), 0)
    to_nan = xp.greater(reaches(allowed, xp.isnan(b)) + reaches(neither, xp.logical_or(plus, minus)), 0)
    total = xp.where(to_plus, total + math.inf, total)
    total = xp.where(to_minus, total - math.inf, total)  # inf - inf is NaN, as in the plain sum
    return xp.where(to_nan, xp.full_like(total, math.nan), total)
