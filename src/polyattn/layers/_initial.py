"""Initial values of weights, drawn by NumPy so that a seed gives the same values on every backend."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from ..errors import ArgumentError, ShapeError
from ..functional._checks import is_integer_number

INITS = ("xavier_uniform", "normal")


def generator(seed: int | np.random.Generator) -> np.random.Generator:
    """Return the generator from which a layer draws its weights in order; the child layers of a block share it."""
    if isinstance(seed, np.random.Generator):
        return seed
    try:
        return np.random.Generator(np.random.PCG64(operator.index(seed)))
    except (TypeError, ValueError):
        raise ArgumentError(f"seed: expected an integer that is not negative, got {seed!r}") from None


def initial_weight(rng: np.random.Generator, init: str, fan_in: int, fan_out: int) -> np.ndarray[Any, Any]:
    """Draw a weight (fan_in, fan_out) in float64.

    ``"xavier_uniform"``: uniform within ±√(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010);
    ``"normal"``: normal with standard deviation 1/√fan_in (LeCun et al., 1998).
    """
    if init not in INITS:
        raise ArgumentError(f"init: expected one of {', '.join(INITS)}, got {init!r}")
    if init == "normal":
        return rng.standard_normal((fan_in, fan_out)) / math.sqrt(fan_in)
    bound = math.sqrt(6 / (fan_in + fan_out))
    return rng.uniform(-bound, bound, (fan_in, fan_out))


def checked_sizes(**sizes: Any) -> tuple[int, ...]:
    """Check that sizes are positive integers, of Python or NumPy, and return them as Python integers."""
    for name, size in sizes.items():
        if not is_integer_number(size) or size < 1:
            raise ShapeError(f"{name}: expected a positive integer, got {size!r}")
    return tuple(int(size) for size in sizes.values())
