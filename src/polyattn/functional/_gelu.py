"""The Gaussian error linear unit, exact and by tanh, and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError
from ._erfc import normal_tail
from ._operation import Operation, expect_floating
from ._range import low
from ._silu import Activation, Logistic, activation_backward, activation_forward

__all__ = ["GeluGrads", "gelu", "gelu_backward", "gelu_forward"]

CUBIC = 0.044715
ROOT = math.sqrt(2 / math.pi)
FAR = 1e3  # there Φ is 0 or 1 to the last digit, and long has been


class GeluGrads(NamedTuple):
    """The gradient of :func:`gelu`."""

    x: Array


def forward(backend: Backend, x: Array, *, approximate: str) -> tuple[Array, tuple[Array]]:
    """Return x · Φ(x), Φ the normal distribution function or its tanh approximation."""
    return activation_forward(backend, GELU[approximate], x), (x,)


def backward(backend: Backend, dy: Array, saved: tuple[Array], *, approximate: str) -> tuple[Array]:
    """Return dy · (Φ(x) + x · Φ′(x))."""
    return (activation_backward(backend, GELU[approximate], dy, saved[0]),)


class Gelu:
    """x · Φ(x), whose derivative is Φ(x) + x · Φ′(x)."""

    def __init__(self, xp: Any, x: Array, *, scaled: bool) -> None:
        self.xp, self.x, self.scaled = xp, x, scaled
        self.positive = xp.astype(xp.greater_equal(x, 0), x.dtype)  # a factor is faster than NumPy's where
        self.size = xp.clip(x * (2 * self.positive - 1), -FAR, FAR)  # |x|, of derivative 1 at 0
        self.tail = normal_tail(xp, self.size)  # Φ(−|x|) / exp(−x² / 2)
        # exp(−x² / 2), or its root; made late, to hold few arrays at a time
        self.power = xp.exp(self.size * self.size * (-0.25 if scaled else -0.5))

    def in_range(self) -> Array:
        """Say where x is not far below 0."""
        return self.xp.greater_equal(self.xp.maximum(self.power, self.positive), low(self.x) ** 2)

    def decay(self) -> Array:
        """Return the root for x < 0."""
        return self.xp.maximum(self.power, self.positive)

    def decay_root(self) -> Array:
        """Return its root."""
        return self.xp.maximum(self.xp.exp(self.size * self.size * -0.125), self.positive)

    def factor(self) -> Array:
        """Return max(x, 0) − |x| · Φ(−|x|), or that divided by the decay."""
        part = self.size * self.tail * self.power
        if self.scaled:
            part = part * self.xp.maximum(self.power, 1 - self.positive)
        return self.positive * self.x - part

    def slope(self) -> Array:
        """Return the derivative, or that divided by the decay's square."""
        below = self.tail - self.size * (1 / math.sqrt(2 * math.pi))  # times exp(−x² / 2): that of −|x|
        if self.scaled:
            return self.positive + (1 - self.positive * (1 + self.power * self.power)) * below
        return self.positive + (1 - 2 * self.positive) * self.power * below


class GeluTanh:
    """x · (1 + tanh(u)) / 2 = x · σ(2u), u = √(2 / π) · (x + 0.044715 x³): 1 + tanh(u) cancels where x < 0."""

    def __init__(self, xp: Any, x: Array, *, scaled: bool) -> None:
        self.x, self.near = x, xp.clip(x, -FAR, FAR) if scaled else x  # the cube of near stays finite
        self.cubic = self.near * self.near * (2 * ROOT * CUBIC)
        self.sigma = Logistic(xp, self.near * (self.cubic + 2 * ROOT), scaled=scaled)

    def in_range(self) -> Array:
        """Say where no power overflows."""
        return self.sigma.xp.isfinite(self.sigma.rest)

    def decay(self) -> Array:
        """Return √exp(2u) for x < 0."""
        return self.sigma.decay

    def decay_root(self) -> Array:
        """Return its root."""
        return self.sigma.decay_root()

    def factor(self) -> Array:
        """Return x · σ(2u), or that divided by the decay."""
        return self.sigma.times(self.x)

    def slope(self) -> Array:
        """Return the derivative, or that divided by the decay's square."""
        return self.sigma.slope(self.near * (3 * self.cubic + 2 * ROOT))


GELU: dict[str, type[Activation]] = {"none": Gelu, "tanh": GeluTanh}


_operation = Operation("gelu", forward, backward)


def gelu(x: Array, *, approximate: str = "none") -> Array:
    r"""Return :math:`x \, \Phi(x)`, element by element.

    Parameters
    ----------
    x : array
        Floating, any shape; float16 and bfloat16 are computed in float32.
    approximate : {"none", "tanh"}
        "none" is exact, :math:`\Phi(x) = \tfrac12 \mathrm{erfc}(-x/\sqrt2)`; "tanh" is
        :math:`\tfrac12 (1 + \tanh(\sqrt{2/\pi}\,(x + 0.044715\,x^3)))`.

    Raises
    ------
    DTypeError, ArgumentError
        If ``x`` is not floating, or ``approximate`` neither of the two.

    Notes
    -----
    Hendrycks and Gimpel, "Gaussian error linear units" (2016).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.gelu(np.array([-1.0, 0.0, 1.0])).round(6)
    array([-0.158655,  0.      ,  0.841345])
    """
    expect_floating(x=x)
    return _operation.call({"x": x}, checked_approximate(approximate))


def gelu_forward(x: Array, *, approximate: str = "none") -> tuple[Array, Cache]:
    """Return ``(gelu(x), cache)``."""
    expect_floating(x=x)
    return _operation.record({"x": x}, checked_approximate(approximate))


def gelu_backward(dy: Array, cache: Cache) -> GeluGrads:
    """Return dy · (Φ(x) + x Φ′(x)), Φ as the forward took it."""
    return _operation.pull(dy, cache, GeluGrads)


def checked_approximate(approximate: str) -> dict[str, str]:
    """Return which of the two Φ is meant as a static argument."""
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return {"approximate": approximate}
