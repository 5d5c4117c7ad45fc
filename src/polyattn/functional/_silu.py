"""The sigmoid linear unit, and its backward."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._checks import expect_floating
from ._dispatch import Operation, run, run_backward, run_with_cache

__all__ = ["SiluGrads", "silu", "silu_backward", "silu_forward"]


class SiluGrads(NamedTuple):
    """The gradient of :func:`silu`."""

    x: Array


class Saved(NamedTuple):
    """What the backward needs."""

    x: Array


def forward(backend: Backend, x: Array) -> tuple[Array, Saved]:
    """Return x · σ(x)."""
    y = backend.operation("silu", x)
    return activation_forward(backend, Silu, x) if y is None else y, Saved(x)


def backward(backend: Backend, dy: Array, saved: Saved) -> SiluGrads:
    """Return dy · (σ(x) + x · σ′(x))."""
    dx = backend.operation("silu_backward", dy, saved.x)
    return SiluGrads(activation_backward(backend, Silu, dy, saved.x) if dx is None else dx)


class Activation(Protocol):
    """A function f(x) = factor · decay, whose derivative is f′(x) = slope · decay².

    For x < 0, f and f′ decay exponentially and may underflow although their product with a large factor does not.
    So the decay, the square root of that exponential (1 for x ≥ 0), is multiplied in one factor at a time.
    """

    decay: Array
    root: Array
    """√decay, for products with two large factors."""

    def __init__(self, xp: Any, x: Array) -> None: ...

    def factor(self) -> Array:
        """Return f(x) / decay."""

    def slope(self) -> Array:
        """Return f′(x) / decay²."""


def activation_forward(backend: Backend, activation: type[Activation], x: Array, up: Array | None = None) -> Array:
    """Return f(x), or f(x) · up."""
    xp = backend.namespace()

    def formula(x: Array, *up: Array) -> Array:
        f = activation(xp, widen(xp, x))
        y = f.factor()
        for factor in up:
            y = y * widen(xp, factor)
        return cast(xp, y * f.decay, x.dtype)

    return backend.by_rows(formula, x, *(() if up is None else (up,)), axes=0)


def activation_backward(backend: Backend, activation: type[Activation], dy: Array, x: Array) -> Array:
    """Return dy · f′(x)."""
    xp = backend.namespace()

    def formula(dy: Array, x: Array) -> Array:
        f = activation(xp, widen(xp, x))
        return cast(xp, widen(xp, dy) * f.decay * f.slope() * f.decay, x.dtype)

    return backend.by_rows(formula, dy, x, axes=0)


class Sigmoid:
    """σ(x) = decay² / total and 1 − σ(x) = rest / total, both accurate also where they are tiny."""

    def __init__(self, xp: Any, x: Array) -> None:
        zero = xp.zeros_like(x)
        self.root = xp.exp(xp.minimum(x, zero) / 4)
        self.decay, self.rest = self.root * self.root, xp.exp(-xp.maximum(x, zero))
        self.total = self.decay * self.decay + self.rest  # one term is 1, both are positive: no cancellation


class SigmoidUnit:
    """x · σ(z), z a function of x, whose derivative is σ(z) · (1 + x · z′ · (1 − σ(z)))."""

    def __init__(self, xp: Any, x: Array, z: Array) -> None:
        self.x, self.sigmoid = x, Sigmoid(xp, z)
        self.decay, self.root = self.sigmoid.decay, self.sigmoid.root

    def xdz(self) -> Array:
        """Return x · z′."""
        raise NotImplementedError

    def factor(self) -> Array:
        """Return x · σ(z) / decay."""
        return self.x * self.decay / self.sigmoid.total

    def slope(self) -> Array:
        """Return the derivative divided by decay²."""
        return (1 + self.xdz() * (self.sigmoid.rest / self.sigmoid.total)) / self.sigmoid.total


class Silu(SigmoidUnit):
    """x · σ(x)."""

    def __init__(self, xp: Any, x: Array) -> None:
        super().__init__(xp, x, x)

    def xdz(self) -> Array:
        """Return x."""
        return self.x


OPERATION = Operation("silu", forward, backward)


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
    return run(OPERATION, {"x": x})


def silu_forward(x: Array) -> tuple[Array, Cache]:
    """Return ``(silu(x), cache)``."""
    expect_floating(x=x)
    return run_with_cache(OPERATION, {"x": x})


def silu_backward(dy: Array, cache: Cache) -> SiluGrads:
    """Return dy · (σ(x) + x σ′(x))."""
    return run_backward(OPERATION, dy, cache, SiluGrads)
