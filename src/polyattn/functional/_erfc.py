"""The complementary error function times exp(x²); the array API standard has no error function.

float64: W. J. Cody, "Rational Chebyshev approximations for the error function",
Mathematics of Computation 23 (1969): three rational functions, each accurate to
float64's rounding on its own interval. float32: one polynomial for all x, fitted
to a relative error of 3.3e-8, at a third of the cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..backend import Array, dtype_name
from ..kernels._static import constant

# Coefficients of numerators and denominators, the highest power first, with the denominators' leading 1.
SMALL = constant((  # of erf(x) / x in x², |x| ≤ 0.46875
    (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
     3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
))  # fmt: skip
MIDDLE = constant((  # of erfc(x) · exp(x²) in x, 0.46875 ≤ x ≤ 4
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
     2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
     1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
))  # fmt: skip
LARGE = constant((  # of the remainder in 1/x², x ≥ 4
    (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
     1.60837851487422766e-2, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242e0, 1.87295284992346725e0, 5.27905102951428412e-1, 6.05183413124413191e-2,
     2.33520497626869185e-3),
))  # fmt: skip
SINGLE = (  # of erfc(x) · exp(x²) / t in t = 1 / (1 + STEEPNESS · x), x ≥ 0, fitted for the least relative error
    -4.14000112e-2, 1.90726597e-1, -3.0065278e-1, 1.42470178e-1, -2.23980314e-2, 1.19964311e-1, 1.75249341e-1,
    2.28271941e-1, 2.53883149e-1, 2.53885321e-1,
)  # fmt: skip
HALVES = constant(tuple(coefficient / 2 for coefficient in SINGLE))
STEEPNESS = constant(0.45)
ROOT_OF_PI = constant(math.sqrt(math.pi))


def normal_tail(xp: Any, x: Array) -> Array:
    """Return Φ(−x) · exp(x² / 2) = erfc(x / √2) · exp(x² / 2) / 2 for a float32 or float64 array of x ≥ 0."""
    if dtype_name(x.dtype) == "float32":
        t = 1 / (1 + x * (STEEPNESS() * math.sqrt(0.5)))
        return t * _horner(t, HALVES())
    return _scaled_erfc(xp, x * math.sqrt(0.5)) / 2


def _scaled_erfc(xp: Any, x: Array) -> Array:
    """Return erfc(x) · exp(x²)."""
    near, distant = xp.clip(x, 0.0, 4.0), xp.clip(x, 4.0, math.inf)
    square = xp.clip(x * x, 0.0, 1.0)
    small = xp.exp(square) * (1 - x * _ratio(square, SMALL()))
    inverse = 1 / (distant * distant)
    large = (1 / ROOT_OF_PI() - inverse * _ratio(inverse, LARGE())) / distant
    return xp.where(x > 4, large, xp.where(x > 0.46875, _ratio(near, MIDDLE()), small))


def _ratio(x: Array, coefficients: tuple[Sequence[float], Sequence[float]]) -> Array:
    numerator, denominator = (_horner(x, row) for row in coefficients)
    return numerator / denominator


def _horner(x: Array, coefficients: Sequence[float]) -> Array:
    result = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        result = result * x + coefficient
    return result
