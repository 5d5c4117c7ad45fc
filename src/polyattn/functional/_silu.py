"""The sigmoid linear unit, and its backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

from ..backend import Array, Backend, Cache, dtype_name
from ..kernels import cast, widen
from ._operation import Operation, expect_floating
from ._range import choose

__all__ = ["SiluGrads", "silu", "silu_backward", "silu_forward"]


FAR = 1e3  # the exponential of minus this is 0


class SiluGrads(NamedTuple):
    """The gradient of :func:`silu`."""

    x: Array


def forward(backend: Backend, x: Array) -> tuple[Array, tuple[Array]]:
    """Return x · σ(x)."""
    return activation_forward(backend, Silu, x), (x,)


def backward(backend: Backend, dy: Array, saved: tuple[Array]) -> tuple[Array]:
    """Return dy · (σ(x) + x · σ′(x))."""
    return (activation_backward(backend, Silu, dy, saved[0]),)


class Activation(Protocol):
    """A function f of an array of float32 or float64: what its value and derivative have in common, and these.

    Where x goes to −∞, f(x) and f′(x) go to 0, and would vanish before they meet a large up or dy. So the ``scaled``
    formulas give factors that are in range, f(x) = factor · decay and f′(x) = slope · decay²: a product takes one at a
    time. The others, which cost less, give f(x) and f′(x) themselves.
    """

    def __init__(self, xp: Any, x: Array, *, scaled: bool) -> None: ...

    def in_range(self) -> Array:
        """Say where f(x) and f′(x) are in range without a decay."""

    def decay(self) -> Array:
        """Return the root of what f falls like below 0; 1 for x ≥ 0."""

    def decay_root(self) -> Array:
        """Return √decay, which is in range where the decay is not."""

    def factor(self) -> Array:
        """Return f(x), or f(x) / decay."""

    def slope(self) -> Array:
        """Return f′(x), or f′(x) / decay²."""


def activation_forward(backend: Backend, activation: type[Activation], x: Array, up: Array | None = None) -> Array:
    """Return f(x), or f(x) · up."""
    xp = backend.namespace()

    def formula(x: Array, *up: Array) -> Array:
        wide, gated = widen(xp, x), [widen(xp, array) for array in up]

        def plain() -> tuple[Array, Array]:
            f = activation(xp, wide, scaled=False)
            return math.prod(gated, start=f.factor()), f.in_range()

        def scaled() -> Array:
            f = activation(xp, wide, scaled=True)
            return math.prod(gated, start=f.factor()) * f.decay()

        return cast(xp, choose(backend, x, plain, scaled), x.dtype)

    return backend.by_rows(formula, x, *(() if up is None else (up,)), axes=0)


def activation_backward(backend: Backend, activation: type[Activation], dy: Array, x: Array) -> Array:
    """Return dy · f′(x)."""
    xp = backend.namespace()

    def formula(dy: Array, x: Array) -> Array:
        dy_, wide = widen(xp, dy), widen(xp, x)

        def plain() -> tuple[Array, Array]:
            f = activation(xp, wide, scaled=False)
            dx = dy_ * f.slope()
            return dx, xp.logical_and(xp.all(f.in_range()), xp.isfinite(xp.sum(dx)))

        def scaled() -> Array:
            f = activation(xp, wide, scaled=True)
            decay = f.decay()
            return dy_ * decay * f.slope() * decay

        return cast(xp, choose(backend, x, plain, scaled), x.dtype)

    return backend.by_rows(formula, dy, x, axes=0)


class Logistic:
    """σ(z) = decay² / total and 1 − σ(z) = rest / total; decay is 1 unless ``scaled``."""

    def __init__(self, xp: Any, z: Array, *, scaled: bool) -> None:
        self.xp, self.z, self.scaled = xp, z, scaled
        if scaled:
            top = 640 if dtype_name(z.dtype) == "float64" else 80  # exp(top) is finite, exp(2 · top) is not
            root, one = xp.exp(xp.clip(z / 2, -FAR, top)), xp.ones_like(z)
            self.decay, self.rest = xp.minimum(root, one), 1 / xp.maximum(root * root, one)
            self.total = self.decay * self.decay + self.rest  # one of the two terms is 1: nothing cancels
        else:
            self.rest = xp.exp(-z)
            self.total = 1 + self.rest

    def decay_root(self) -> Array:
        """Return √decay."""
        return self.xp.exp(self.xp.clip(self.z / 4, -FAR, 0))

    def times(self, x: Array) -> Array:
        """Return x · σ(z) / decay."""
        return (x * self.decay if self.scaled else x) / self.total

    def slope(self, xdz: Array) -> Array:
        """Return the derivative σ(z) · (1 + x z′ · (1 − σ(z))) of x · σ(z), divided by decay²."""
        return (1 + xdz / self.total * self.rest) / self.total


class Silu:
    """x · σ(x), whose derivative is σ(x) · (1 + x · (1 − σ(x)))."""

    def __init__(self, xp: Any, x: Array, *, scaled: bool) -> None:
        self.x, self.sigma = x, Logistic(xp, x, scaled=scaled)

    def in_range(self) -> Array:
        """Say where no power overflows."""
        return self.sigma.xp.isfinite(self.sigma.rest)

    def decay(self) -> Array:
        """Return √exp(x) for x < 0."""
        return self.sigma.decay

    def decay_root(self) -> Array:
        """Return its root."""
        return self.sigma.decay_root()

    def factor(self) -> Array:
        """Return x · σ(x), or that divided by the decay."""
        return self.sigma.times(self.x)

    def slope(self) -> Array:
        """Return the derivative, or that divided by the decay's square."""
        return self.sigma.slope(self.x)


_operation = Operation("silu", forward, backward)


def silu(x: Array) -> Array:
    r"""Return :math:`x \, \sigma(x) = x / (1 + e^{-x})`, element by element; also called swish.

    Parameters
    ----------
    x : array
        Floating, any shape; float16 and bfloat16 are computed in float32.

    Raises
    ------
    DTypeError
        If ``x`` is not floating.

    Notes
    -----
    Elfwing, Uchibe and Doya, "Sigmoid-weighted linear units for neural network function
    approximation in reinforcement learning" (2017).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.silu(np.array([-1.0, 0.0, 1.0])).round(6)
    array([-0.268941,  0.      ,  0.731059])
    """
    expect_floating(x=x)
    return _operation.call({"x": x})


def silu_forward(x: Array) -> tuple[Array, Cache]:
    """Return ``(silu(x), cache)``."""
    expect_floating(x=x)
    return _operation.record({"x": x})


def silu_backward(dy: Array, cache: Cache) -> SiluGrads:
    """Return dy · (σ(x) + x σ′(x))."""
    return _operation.pull(dy, cache, SiluGrads)
