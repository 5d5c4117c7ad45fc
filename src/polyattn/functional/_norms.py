"""What the normalisations share: the axes that they go over, and the check of their arguments."""

from __future__ import annotations

import math
import numbers
from typing import Any

from ..backend import Array
from ..errors import ArgumentError, ShapeError
from ._checks import expect_one_dtype, expect_rank, expect_shape, is_number, shown


def trailing(x: Array, axes: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the axes before the last so many, those themselves, and how many elements they hold: 1 for none."""
    lead = x.ndim - axes
    # The mean of no elements is not asked for.
    return tuple(range(lead)), tuple(range(lead, x.ndim)), max(math.prod(x.shape[lead:]), 1)


def checked_norm(
    x: Array, eps: float, axes: int, **parameters: Array | None
) -> tuple[dict[str, Array | None], dict[str, Any]]:
    """Return the arrays by name and the static arguments of a normalisation, or raise what is wrong with them."""
    expect_one_dtype(x=x, **parameters)
    expect_rank("x", x, 1)
    if isinstance(axes, bool) or not isinstance(axes, numbers.Integral) or not 1 <= axes <= x.ndim:
        raise ShapeError(f"axes: expected how many of the last axes of x, from 1 to {x.ndim}, got {shown(axes)}")
    for name, parameter in parameters.items():
        if parameter is not None:
            expect_shape(name, parameter, tuple(x.shape[x.ndim - axes :]))
    return {"x": x, **parameters}, {"eps": checked_eps(eps), "axes": int(axes)}


def checked_eps(eps: float) -> float:
    """Return what is added inside the root."""
    if not is_number(eps) or not eps >= 0:
        raise ArgumentError(f"eps: expected a number that is not negative, got {shown(eps)}")
    return float(eps)
