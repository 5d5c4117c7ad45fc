"""Scaling by powers of two, which keeps the sums and products of a formula inside the range of its dtype.

Scaling by a power of two is exact. If values can be read (``Backend.state(x).readable``), the plain formula is computed
first, and the scaled one only if a cheap statistic of the plain result shows an overflow or underflow. Reading a value
would break a trace or wait for a device: there the scaled formula is always computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..backend import Array, Backend, dtype_name
from ..kernels._static import constant_result

COUNT = 7
"""The number of powers above 1, and of powers below 1, among which :func:`half_power` chooses."""


def step(x: Array) -> int:
    """Return the difference of the exponents of neighbouring powers: an eighth of the largest exponent of the dtype."""
    return 128 if dtype_name(x.dtype) == "float64" else 16


def low(xp: Any, x: Array) -> float:
    """Return a small number whose square, and the square of its inverse, are far inside the normal range."""
    return 2.0**-384 if x.dtype == xp.float64 else 2.0**-48


def largest(xp: Any, x: Array, axes: tuple[int, ...]) -> Array:
    """Return the largest magnitude along ``axes``, keeping dimensions; 0 for an empty array."""
    size = xp.abs(x)
    reduce = xp.sum if 0 in x.shape else xp.max
    return reduce(size, axis=axes, keepdims=True)


def half_power(backend: Backend, size: Array) -> Array:
    """Return h, a power of two for each of (…, 1), so that size · h² lies between 2⁻¹⁶ and 2¹⁶ (float64: 2^∓128).

    h is 1 where the size is in that interval already. Subnormal sizes stay below it. h has no derivative, since it is
    computed from constants and comparisons. The constants are created on the device, without a copy from the host.
    """
    xp, device = backend.namespace(), backend.native_device(backend.device_of(size))
    order = xp.arange(2 * COUNT, dtype=size.dtype, device=device) - (COUNT - 0.5)
    bounds = xp.exp(order * (step(size) * math.log(2)))  # (14,), 2⁻¹⁰⁴ to 2¹⁰⁴, not necessarily exact
    half = 2.0 ** (step(size) // 2)
    factors = xp.where(xp.greater_equal(size, bounds), xp.full_like(bounds, 1 / half), xp.ones_like(bounds))  # (…, 14)
    return xp.prod(factors, axis=-1, keepdims=True) * half**COUNT  # (…, 1)


def product(xp: Any, a: Array, b: Array, x: Array) -> Array:
    """Return ``a · b · x``, linear in ``x``; no intermediate result overflows or underflows unless the product does.

    If one of |a| and |b| is below 1 and the other is not, a · b lies between them and comes first. If both are below 1,
    a · x underflows only if a · x · b does; if neither is, a · x overflows only if a · x · b does.
    """
    alike = xp.equal(xp.greater_equal(xp.abs(a), xp.ones_like(a)), xp.greater_equal(xp.abs(b), xp.ones_like(b)))
    first, last = xp.where(alike, a, xp.multiply(a, b)), xp.where(alike, b, xp.ones_like(b))
    return xp.multiply(xp.multiply(first, x), last)


@constant_result
def largest_unit(dtype: str) -> float:
    """Return the largest power of two with a normal reciprocal: some libraries divide by multiplying with that."""
    return {"float32": 2.0**126, "float64": 2.0**1022}[dtype]


def unit_of(xp: Any, peak: Array) -> Array:
    """Return a divisor that scales the largest magnitude, ``peak``, to 1 to 4; it is 1 for 0, ∞ and NaN."""
    usable = xp.logical_and(xp.greater(peak, xp.zeros_like(peak)), xp.isfinite(peak))
    largest = xp.full_like(peak, largest_unit(dtype_name(peak.dtype)))
    return xp.where(usable, xp.minimum(peak, largest), xp.ones_like(peak))


def choose(backend: Backend, x: Array, plain: Callable[[], tuple[Any, Array]], scaled: Callable[[], Any]) -> Any:
    """Return ``result`` of ``result, in_range = plain()`` if in_range holds everywhere, else ``scaled()``.

    If the values of x cannot be read, return ``scaled()`` always.
    """
    if not backend.state(x).readable:
        return scaled()
    result, in_range = plain()
    return result if bool(backend.namespace().all(in_range)) else scaled()


def within(xp: Any, x: Array, low: float, high: float) -> bool:
    """Return whether every element is between two numbers. It reads the values."""
    return 0 in x.shape or (bool(xp.greater_equal(xp.min(x), low)) and bool(xp.less_equal(xp.max(x), high)))


def stands(backend: Backend, xp: Any, y: Array) -> bool:
    """Return whether a plain result is the final one: its sum is finite, or its values cannot be read."""
    if not backend.state(y).readable:
        return True
    total = xp.sum(y)
    return not bool(total - total)  # 0, or NaN if the sum is not finite; NaN counts as true


def shrink(x: Array) -> float:
    """Return a power of two by which two factors are scaled so that no sum of many products of them overflows."""
    return 2.0 ** (-5 * step(x))


def apply_linear(backend: Backend, function: Callable[[Array], Array], x: Array) -> Array:
    """Return ``function(x)`` for a linear function; where a sum overflows, it is computed again from a scaled-down x.

    A trace computes it once: a choice by its values would not be linear, and JAX transposes backwards.
    """
    xp, y = backend.namespace(), function(x)
    if stands(backend, xp, y):
        return y
    return xp.where(xp.isfinite(y), y, function(x * shrink(x)) / shrink(x))
