"""A product of three factors whose intermediate results stay between its factors and its value."""

from __future__ import annotations

from typing import Any

from ..kernels import Array

__all__ = ["product"]


def product(xp: Any, a: Array, b: Array, x: Array) -> Array:
    """Return ``a · b · x``, linear in ``x``; no intermediate result overflows or underflows unless the product does.

    If one of |a| and |b| is below 1 and the other is not, a · b lies between them and comes first. If both are below 1,
    a · x underflows only if a · x · b does; if neither is, a · x overflows only if a · x · b does.
    """
    alike = xp.equal(xp.greater_equal(xp.abs(a), xp.ones_like(a)), xp.greater_equal(xp.abs(b), xp.ones_like(b)))
    first, last = xp.where(alike, a, xp.multiply(a, b)), xp.where(alike, b, xp.ones_like(b))
    return xp.multiply(xp.multiply(first, x), last)
