"""Products and quotients whose intermediate results stay in the range of the dtype."""

from __future__ import annotations

from typing import Any

from ..kernels import Array, dtype_name

__all__ = ["product", "unit_of"]

LARGEST_UNIT = {"float32": 2.0**126, "float64": 2.0**1022}
"""The largest power of two whose reciprocal is a normal number: some libraries divide by multiplying with that."""


def product(xp: Any, a: Array, b: Array, x: Array) -> Array:
    """Return ``a · b · x``, linear in ``x``; no intermediate result overflows or underflows unless the product does.

    If one of |a| and |b| is below 1 and the other is not, a · b lies between them and comes first. If both are below 1,
    a · x underflows only if a · x · b does; if neither is, a · x overflows only if a · x · b does.
    """
    alike = xp.equal(xp.greater_equal(xp.abs(a), xp.ones_like(a)), xp.greater_equal(xp.abs(b), xp.ones_like(b)))
    first, last = xp.where(alike, a, xp.multiply(a, b)), xp.where(alike, b, xp.ones_like(b))
    return xp.multiply(xp.multiply(first, x), last)


def unit_of(xp: Any, peak: Array) -> Array:
    """Return what to divide numbers by so that the largest magnitude, ``peak``, becomes 1 to 4; 1 for 0, ∞, NaN."""
    usable = xp.logical_and(xp.greater(peak, xp.zeros_like(peak)), xp.isfinite(peak))
    largest = xp.full_like(peak, LARGEST_UNIT[dtype_name(peak.dtype)])
    return xp.where(usable, xp.minimum(peak, largest), xp.ones_like(peak))
