"""The activations and the gated linear units, each with its gradients."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from ._functional import Float, f64

_erf = np.vectorize(math.erf, otypes=[np.float64])


def relu(x: ArrayLike) -> Float:
    """Return max(x, 0)."""
    return np.maximum(f64(x), 0.0)


def relu_gradient(dy: ArrayLike, x: ArrayLike) -> Float:
    """Return dy where x > 0, zero elsewhere (at 0 too)."""
    return np.where(f64(x) > 0, f64(dy), 0.0)


def gelu(x: ArrayLike, approximate: str = "none") -> Float:
    """Return x Φ(x), Φ the normal distribution function, or its tanh approximation (Hendrycks and Gimpel 2016)."""
    x = f64(x)
    if approximate == "tanh":
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))))


def gelu_gradient(dy: ArrayLike, x: ArrayLike, approximate: str = "none") -> Float:
    """Return dy · d gelu / dx."""
    x, dy = f64(x), f64(dy)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        dinner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        return np.asarray(dy * (0.5 * (1 + np.tanh(inner)) + 0.5 * x * dinner * (1 - np.tanh(inner) ** 2)))
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return np.asarray(dy * (0.5 * (1 + _erf(x / math.sqrt(2))) + x * density))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


_sigma = np.vectorize(_sigmoid, otypes=[np.float64])


def silu(x: ArrayLike) -> Float:
    """Return x σ(x), σ the logistic function."""
    return np.asarray(f64(x) * _sigma(f64(x)))


def silu_gradient(dy: ArrayLike, x: ArrayLike) -> Float:
    """Return dy · d silu / dx."""
    x = f64(x)
    return np.asarray(f64(dy) * (_sigma(x) + x * _sigma(x) * _sigma(-x)))


def swiglu(gate: ArrayLike, up: ArrayLike) -> Float:
    """Return silu(gate) · up."""
    return np.asarray(silu(gate) * f64(up))


def swiglu_gradients(dy: ArrayLike, gate: ArrayLike, up: ArrayLike) -> tuple[Float, Float]:
    """Return the gradients of gate and up."""
    return silu_gradient(f64(dy) * f64(up), gate), f64(dy) * silu(gate)


def geglu(gate: ArrayLike, up: ArrayLike, approximate: str = "none") -> Float:
    """Return gelu(gate) · up."""
    return np.asarray(gelu(gate, approximate) * f64(up))


def geglu_gradients(dy: ArrayLike, gate: ArrayLike, up: ArrayLike, approximate: str = "none") -> tuple[Float, Float]:
    """Return the gradients of gate and up."""
    return gelu_gradient(f64(dy) * f64(up), gate, approximate), f64(dy) * gelu(gate, approximate)
