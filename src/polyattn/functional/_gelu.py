"""The Gaussian error linear unit, exact and by tanh, and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError
from ._erfc import normal_tail
from ._operation import Operation, expect_floating
from ._silu import Activation, activation_backward, activation_forward, exp_below_zero, logistic, logistic_product

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
    return (activation_backward(backend, dy, saved[0], GELU[approximate]),)


class Gelu:
    """x · Φ(x), whose derivative is Φ(x) + x · Φ′(x)."""

    def __init__(self, xp: Any, x: Array) -> None:
        self.xp, self.x = xp, x
        self.positive = xp.astype(xp.greater_equal(x, 0), x.dtype)  # a factor is faster than NumPy's where
        self.size = xp.clip(x * (2 * self.positive - 1), -FAR, FAR)  # |x|, of derivative 1 at 0
        self.tail = normal_tail(xp, self.size)  # Φ(−|x|) / exp(−x² / 2)
        self.root = xp.exp(self.size * self.size * -0.25)  # of exp(−x² / 2); made late, to hold few arrays at a time

    def decay(self) -> Array:
        """Return the root for x < 0."""
        return self.xp.maximum(self.root, self.positive)

    def decay_root(self) -> Array:
        """Return its root."""
        return self.xp.maximum(self.xp.exp(self.size * self.size * -0.125), self.positive)

    @classmethod
    def product(cls, backend: Backend, x: Array, up: Array | None) -> Array:
        """Return max(x, 0) − |x| · Φ(−|x|), times up."""
        f = cls(backend.namespace(), x)
        if up is None:
            return f.positive * f.x - f.size * f.tail * f.root * f.root
        return f.factor() * up * f.decay()

    def factor(self) -> Array:
        """Return x · Φ(x) divided by the decay."""
        part = self.size * self.tail * self.root
        return self.positive * self.x - part * self.xp.maximum(self.root, 1 - self.positive)

    def slope(self) -> Array:
        """Return the derivative divided by the decay's square."""
        below = self.tail - self.size * (1 / math.sqrt(2 * math.pi))  # where x < 0; above it is 1 − below · root²
        return self.positive + (1 - self.positive * (1 + self.root * self.root)) * below


class GeluTanh:
    """x · (1 + tanh(u)) / 2 = x · σ(2u), u = √(2 / π) · (x + 0.044715 x³): 1 + tanh(u) cancels where x < 0."""

    def __init__(self, xp: Any, x: Array) -> None:
        self.xp, self.x, self.near = xp, x, xp.clip(x, -FAR, FAR)  # its cube stays finite
        self.cubic = self.near * self.near * (2 * ROOT * CUBIC)
        self.twice = self.near * (self.cubic + 2 * ROOT)  # 2u
        self.root, self.rest, self.total = logistic(xp, self.twice)

    def decay(self) -> Array:
        """Return √exp(2u) for x < 0."""
        return self.root

    def decay_root(self) -> Array:
        """Return its root."""
        return exp_below_zero(self.xp, self.twice / 4)

    @classmethod
    def product(cls, backend: Backend, x: Array, up: Array | None) -> Array:
        """Return x · σ(2u) · up."""
        xp = backend.namespace()
        return logistic_product(backend, x, lambda: x * (x * x * (2 * ROOT * CUBIC) + 2 * ROOT), lambda: cls(xp, x), up)

    def factor(self) -> Array:
        """Return x · σ(2u) divided by the decay."""
        return self.x * self.root / self.total

    def slope(self) -> Array:
        """Return the derivative σ(2u) · (1 + 2 x u′ · (1 − σ(2u))) divided by the decay's square."""
        return (1 + self.near * (3 * self.cubic + 2 * ROOT) * self.rest / self.total) / self.total


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
