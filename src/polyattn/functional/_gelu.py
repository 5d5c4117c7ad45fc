"""The Gaussian error linear unit, exact or with the tanh approximation, and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError
from ..kernels._static import constant
from ._checks import expect_floating
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._erfc import normal_tail
from ._silu import Activation, SigmoidUnit, activation_backward, activation_forward

__all__ = ["GeluGrads", "gelu", "gelu_backward", "gelu_forward"]

CUBIC = constant(0.044715)
ROOT = constant(math.sqrt(2 / math.pi))
ROOT_OF_TAU = constant(math.sqrt(2 * math.pi))
FAR = constant(1e3)  # from here on tanh(u) rounds to ±1


class GeluGrads(NamedTuple):
    """The gradient of :func:`gelu`."""

    x: Array


class Saved(NamedTuple):
    """What the backward needs."""

    x: Array
    approximate: str


def forward(backend: Backend, x: Array, *, approximate: str) -> tuple[Array, Saved]:
    """Return x · Φ(x), Φ the normal distribution function or its tanh approximation."""
    y = backend.operation("gelu", x, approximate=approximate)
    return activation_forward(backend, GELU[approximate], x) if y is None else y, Saved(x, approximate)


def backward(backend: Backend, dy: Array, saved: Saved) -> GeluGrads:
    """Return dy · (Φ(x) + x · Φ′(x))."""
    dx = backend.operation("gelu_backward", dy, saved.x, approximate=saved.approximate)
    return GeluGrads(activation_backward(backend, GELU[saved.approximate], dy, saved.x) if dx is None else dx)


class Gelu:
    """x · Φ(x) = max(x, 0) − |x| · Φ(−|x|), whose derivative is Φ(x) + x · Φ′(x)."""

    def __init__(self, xp: Any, x: Array) -> None:
        self.xp, self.x = xp, x
        self.positive = xp.astype(xp.greater_equal(x, 0), x.dtype)  # multiplying by 0 or 1 is faster than NumPy's where
        self.size = xp.clip(x * (2 * self.positive - 1), -FAR(), FAR())  # |x|, with derivative 1 at 0
        self.tail = normal_tail(xp, self.size)  # Φ(−|x|) / exp(−x² / 2)
        root = xp.exp(self.size * self.size * -0.125)
        self.bell_root = root * root  # √exp(−x² / 2)
        self.root, self.decay = xp.maximum(root, self.positive), xp.maximum(self.bell_root, self.positive)

    def factor(self) -> Array:
        """Return x · Φ(x) / decay."""
        other = self.xp.maximum(self.bell_root, 1 - self.positive)  # exp(−x² / 2) / bell_root / decay
        return self.positive * self.x - self.size * self.tail * self.bell_root * other

    def slope(self) -> Array:
        """Return the derivative divided by decay²; for x ≥ 0 the derivative is 1 minus that at −x."""
        below = self.tail - self.size / ROOT_OF_TAU()  # Φ(−|x|) − |x| · Φ′(x), divided by exp(−x² / 2)
        return self.positive + (1 - self.positive * (1 + self.bell_root * self.bell_root)) * below


class GeluTanh(SigmoidUnit):
    """x · (1 + tanh(u)) / 2 = x · σ(2u) with u = √(2 / π) · (x + 0.044715 x³): 1 + tanh(u) itself cancels for x < 0."""

    def __init__(self, xp: Any, x: Array) -> None:
        self.near = xp.clip(x, -FAR(), FAR())  # its cube stays finite
        self.cubic = self.near * self.near * (2 * ROOT() * CUBIC())
        super().__init__(xp, x, self.near * (self.cubic + 2 * ROOT()))

    def xdz(self) -> Array:
        """Return x · 2u′."""
        return self.near * (3 * self.cubic + 2 * ROOT())


GELU: dict[str, type[Activation]] = {"none": Gelu, "tanh": GeluTanh}


OPERATION = Operation("gelu", forward, backward)


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
    return run(OPERATION, {"x": x}, checked_approximate(approximate))


def gelu_forward(x: Array, *, approximate: str = "none") -> tuple[Array, Cache]:
    """Return ``(gelu(x), cache)``."""
    expect_floating(x=x)
    return run_with_cache(OPERATION, {"x": x}, checked_approximate(approximate))


def gelu_backward(dy: Array, cache: Cache) -> GeluGrads:
    """Return dy · (Φ(x) + x Φ′(x)), with the forward's Φ."""
    return run_backward(OPERATION, dy, cache, GeluGrads)


def checked_approximate(approximate: str) -> dict[str, str]:
    """Check ``approximate``, and return it as a static argument."""
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return {"approximate": approximate}
