"""The sigmoid linear unit, and its backward."""

from __future__ import annotations

from collections.abc import Callable
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
    return (activation_backward(backend, dy, saved[0], Silu),)


class Activation(Protocol):
    """A function f of an array of float32 or float64: what its value and derivative have in common, and these.

    Where x goes to −∞, f(x) and f′(x) go to 0, and would vanish before they meet a large up or dy. So both come in
    factors that are in range, f(x) = factor · decay and f′(x) = slope · decay²: a product takes one at a time.
    """

    def __init__(self, xp: Any, x: Array) -> None: ...

    def decay(self) -> Array:
        """Return the root of what f falls like below 0; 1 for x ≥ 0."""

    def decay_root(self) -> Array:
        """Return √decay, which is in range where the decay is not."""

    @classmethod
    def product(cls, backend: Backend, x: Array, up: Array | None) -> Array:
        """Return f(x) · up, or f(x)."""

    def factor(self) -> Array:
        """Return f(x) / decay."""

    def slope(self) -> Array:
        """Return f′(x) / decay²."""


def activation_forward(backend: Backend, activation: type[Activation], x: Array, up: Array | None = None) -> Array:
    """Return f(x), or f(x) · up."""
    xp = backend.namespace()

    def formula(x: Array, *up: Array) -> Array:
        wide = (widen(xp, array) for array in up)
        return cast(xp, activation.product(backend, widen(xp, x), next(wide, None)), x.dtype)

    return backend.by_rows(formula, x, *(() if up is None else (up,)), axes=0)


def activation_backward(backend: Backend, dy: Array, x: Array, activation: type[Activation]) -> Array:
    """Return dy · f′(x)."""
    xp = backend.namespace()

    def formula(dy: Array, x: Array) -> Array:
        f = activation(xp, widen(xp, x))
        decay = f.decay()
        return cast(xp, widen(xp, dy) * decay * f.slope() * decay, x.dtype)

    return backend.by_rows(formula, dy, x, axes=0)


class Silu:
    """x · σ(x), whose derivative is σ(x) · (1 + x · (1 − σ(x)))."""

    def __init__(self, xp: Any, x: Array) -> None:
        self.xp, self.x = xp, x
        self.root, self.rest, self.total = logistic(xp, x)

    def decay(self) -> Array:
        """Return √exp(x) for x < 0."""
        return self.root

    def decay_root(self) -> Array:
        """Return its root."""
        return exp_below_zero(self.xp, self.x / 4)

    @classmethod
    def product(cls, backend: Backend, x: Array, up: Array | None) -> Array:
        """Return x · σ(x) · up."""
        return logistic_product(backend, x, lambda: x, lambda: cls(backend.namespace(), x), up)

    def factor(self) -> Array:
        """Return x · σ(x) divided by the decay."""
        return self.x * self.root / self.total

    def slope(self) -> Array:
        """Return its derivative divided by the decay's square."""
        return (1 + self.x * self.rest / self.total) / self.total


def exp_below_zero(xp: Any, x: Array) -> Array:
    """Return exp(x) for x < 0, else 1."""
    return xp.exp(xp.clip(x, -FAR, 0))


def logistic_product(
    backend: Backend, x: Array, of_x: Callable[[], Array], activation: Callable[[], Activation], up: Array | None
) -> Array:
    """Return x · σ(of_x) · up, which is the product of an activation, by a shorter formula where that is enough."""
    xp = backend.namespace()

    def plain() -> tuple[Array, Array]:
        power = xp.exp(-of_x())
        y = x / (1 + power)
        return (y if up is None else y * up), power

    def scaled() -> tuple[Array, Array]:
        f = activation()
        y, decay = f.factor(), f.decay()
        return (y if up is None else y * up) * decay, decay

    return choose(backend, x, plain, lambda result: xp.isfinite(xp.sum(result[1])), scaled)[0]


def logistic(xp: Any, x: Array) -> tuple[Array, Array, Array]:
    """Return ``decay, rest, total`` of σ(x) = decay² / total and 1 − σ(x) = rest / total, accurate where tiny too."""
    top = 640 if dtype_name(x.dtype) == "float64" else 80  # its exponential is finite, and the square of that is not
    root, one = xp.exp(xp.clip(x / 2, -FAR, top)), xp.ones_like(x)
    decay, rest = xp.minimum(root, one), 1 / xp.maximum(root * root, one)
    return decay, rest, decay * decay + rest  # one of the two terms is 1: nothing cancels


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
