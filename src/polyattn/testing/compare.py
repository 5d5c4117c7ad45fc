"""Comparison within tolerances, and central differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["TOLERANCES", "assert_close", "central_differences", "slopes_agree"]

TOLERANCES = {"float64": 1e-11, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""The largest error relative to the largest expected magnitude; in low precision, two units in the last place."""


def assert_close(
    actual: Any, expected: Any, dtype: str = "float64", *, scale: float | None = None, what: str = "result"
) -> None:
    """Fail unless shapes, NaNs and infinities are equal and the largest error is within the tolerance.

    Parameters
    ----------
    actual, expected : array_like
        On the host.
    dtype : str
        The precision of the computation, a key of ``TOLERANCES``.
    scale : float, optional
        The magnitude to which the error is relative. The default is the largest finite
        magnitude in ``expected``; pass it if ``expected`` is mathematically zero.
    what : str
        The name in the message.
    """
    got, want = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert got.shape == want.shape, f"{what}: expected the shape {want.shape}, got {got.shape}"
    finite = np.isfinite(want)
    special = np.array_equal(got[~finite], want[~finite], equal_nan=True)
    assert special, f"{what}: expected {want[~finite]} where it is not finite, got {got[~finite]}"
    if not finite.any():
        return
    error, worst = largest_error(got, want, scale)
    assert error <= TOLERANCES[dtype], (
        f"{what}: relative error {error:.3g} at {worst} exceeds {TOLERANCES[dtype]:.0e} "
        f"({dtype}): expected {want[worst]!r}, got {got[worst]!r}"
    )


def largest_error(
    got: NDArray[np.float64], want: NDArray[np.float64], scale: float | None = None
) -> tuple[float, tuple[int, ...]]:
    """Return the largest error of a result, and its index; infinite where only one of the two is NaN or infinite.

    It is relative to ``scale``, by default the largest finite magnitude in ``want``, as in :func:`assert_close`.
    """
    if scale is None:
        scale = float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want))) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        errors = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want) / scale)
    errors = np.where(np.isnan(errors), np.inf, errors)
    worst = tuple(map(int, np.unravel_index(np.argmax(errors), errors.shape)))
    return float(errors[worst]), worst


def central_differences(function: Callable[[Any], float], x: ArrayLike, step: float = 1e-6) -> NDArray[np.float64]:
    """Return the gradient of a scalar function of one array, element by element."""
    point = np.array(x, dtype=np.float64)
    slope = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        ends = []
        for sign in (1, -1):
            moved = point.copy()
            moved[index] += sign * step
            ends.append(function(moved))
        slope[index] = (ends[0] - ends[1]) / (2 * step)
    return slope


def slopes_agree(
    function: Callable[..., float],
    arguments: Sequence[NDArray[np.float64]],
    gradients: Sequence[ArrayLike],
    *,
    tolerance: float = 1e-6,
    step: float = 1e-5,
) -> None:
    """Fail unless the gradients agree with central differences of ``function`` along random directions.

    Each argument is varied separately along three directions. The error is
    relative to the norm of the gradient times that of the direction.
    """
    rng = np.random.default_rng(20)
    for position, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
        gradient = np.asarray(gradient, dtype=np.float64)
        for _ in range(3):
            direction = rng.standard_normal(argument.shape)
            ends = [
                function(*arguments[:position], argument + sign * step * direction, *arguments[position + 1 :])
                for sign in (1, -1)
            ]
            numerical = (ends[0] - ends[1]) / (2 * step)
            along = float(np.sum(gradient * direction))
            scale = float(np.linalg.norm(gradient) * np.linalg.norm(direction)) or 1.0
            error = abs(along - numerical) / scale
            assert error <= tolerance, (
                f"argument {position}: the gradient gives the slope {along!r}, central differences {numerical!r} "
                f"(relative error {error:.3g} exceeds {tolerance:.0e})"
            )
