"""Plain formulas in decimal numbers of 60 digits and any magnitude, for inputs at both ends of a dtype's range.

The arrays have the dtype object and contain Python's ``Decimal``: NumPy's arithmetic, sqrt and exp call its methods.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["exact", "exactly", "gelu_and_slope", "gelu_tanh_and_slope", "norm_and_gradients", "silu_and_slope"]

Exact = NDArray[np.object_]
FAR = 100_000
"""Beyond it a density or a logistic function is 0 or 1, whatever a float64 multiplies it by."""


def exact(x: ArrayLike) -> Exact:
    """Return the exact values of an array."""
    return np.array(np.vectorize(lambda number: Decimal(float(number)), otypes=[object])(x), dtype=object)


def exactly(function: Callable[..., Any], *arguments: Any, digits: int = 60) -> Any:
    """Return ``function(*arguments)``, computed with that number of digits."""
    with localcontext() as context:
        context.prec = digits
        return function(*arguments)


def norm_and_gradients(dy: Exact, x: Exact, weight: Exact, eps: float, centre: bool) -> tuple[Exact, Exact, Exact]:
    """Return y, dx and dweight of the layer norm, or of the root-mean-square norm, over the last axis."""
    n = x.shape[-1]

    def mean(x: Any) -> Any:
        return np.sum(x, axis=-1, keepdims=True) / n

    centred = x - mean(x) if centre else x
    root = np.sqrt(mean(centred * centred) + Decimal(eps))
    normalised, dnormalised = centred / root, dy * weight
    dx = dnormalised - normalised * mean(dnormalised * normalised) - (mean(dnormalised) if centre else 0)
    return normalised * weight, dx / root, np.sum(dy * normalised, axis=0)


def silu_and_slope(x: Decimal) -> tuple[Decimal, Decimal]:
    """Return x σ(x) and its derivative."""
    return _logistic_unit(x, x, Decimal(1))


def gelu_tanh_and_slope(x: Decimal) -> tuple[Decimal, Decimal]:
    """Return the tanh approximation of x Φ(x), which is x σ(2u), and its derivative."""
    root, cubic = (2 / _pi()).sqrt(), Decimal("0.044715")
    return _logistic_unit(x, 2 * root * (x + cubic * x**3), 2 * root * (1 + 3 * cubic * x * x))


def gelu_and_slope(x: Decimal) -> tuple[Decimal, Decimal]:
    """Return x Φ(x) and its derivative, with Φ by its power series, which loses about x² / 2 digits."""
    if abs(x) > 60:
        return (x, Decimal(1)) if x > 0 else (Decimal(0), Decimal(0))
    with localcontext() as context:
        context.prec += int(x * x)
        density = (-x * x / 2).exp() / (2 * _pi()).sqrt()
        total, term = Decimal(0), x
        for k in range(1, 20 + 4 * int(x * x + 50)):
            total += term
            term *= x * x / (2 * k + 1)
        phi = Decimal("0.5") + density * total
        return x * phi, phi + x * density


def _logistic_unit(x: Decimal, z: Decimal, slope: Decimal) -> tuple[Decimal, Decimal]:
    if abs(z) > FAR:
        return (x, Decimal(1)) if z > 0 else (Decimal(0), Decimal(0))
    sigma, rest = 1 / (1 + (-z).exp()), 1 / (1 + z.exp())
    return x * sigma, sigma * (1 + x * slope * rest)


def _pi() -> Decimal:
    """Return π by Machin's formula, in the precision of the context."""
    with localcontext() as context:
        context.prec += 5

        def arctan_of_inverse(n: int) -> Decimal:
            total, power, k = Decimal(0), Decimal(1) / n, 0
            while abs(power) > Decimal(10) ** -context.prec:
                total += power / (2 * k + 1) * (-1) ** k
                power, k = power / (n * n), k + 1
            return total

        return 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239))
