"""Rotary embedding as a product of complex numbers, with the published frequencies of each pair."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._functional import Float, f64


def rotary_embedding(
    x: ArrayLike,
    *,
    positions: ArrayLike | None = None,
    offset: ArrayLike = 0,
    base: float = 10000.0,
    dim: int | None = None,
    interleaved: bool = False,
    scaling: dict[str, Any] | None = None,
) -> Float:
    """Return m (x₁ + i x₂) e^(i p θ) for each pair of features, as pairs of real numbers.

    ``scaling`` has the kind and its parameters: ``{"kind": "linear", "factor": 2.0}``.
    """
    x = f64(x)
    n, dim = x.shape[-2], x.shape[-1] if dim is None else dim
    steps = np.asarray(offset)[..., None] + np.arange(n) if positions is None else np.asarray(positions)
    frequencies, magnitude = rotary_frequencies(dim, base, **(scaling or {}))
    angles = steps[..., :, None].astype(np.float64) * frequencies  # (…, n, dim / 2)
    if x.ndim > 2:
        angles = angles[..., None, :, :]
    first, second = (slice(0, dim, 2), slice(1, dim, 2)) if interleaved else (slice(dim // 2), slice(dim // 2, dim))
    rotated = magnitude * (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)
    y = x.copy()
    y[..., first], y[..., second] = rotated.real, rotated.imag
    return y


def rotary_embedding_gradient(dy: ArrayLike, **arguments: Any) -> Float:
    """Return the gradient of x: rotation is linear, and its transpose is the inverse rotation."""
    dy = f64(dy)
    positions = arguments.pop("positions", None)
    if positions is None:
        positions = np.asarray(arguments.pop("offset", 0))[..., None] + np.arange(dy.shape[-2])
    return rotary_embedding(dy, positions=-np.asarray(positions, dtype=np.int64), **arguments)


def rotary_frequencies(dim: int, base: float, kind: str | None = None, **numbers: Any) -> tuple[Float, float]:
    """Return the rotation angle of each pair for one position, and the magnitude."""
    if kind == "ntk":
        base = base * numbers["factor"] ** (dim / (dim - 2))
    plain = [1.0 / base ** (2 * i / dim) for i in range(dim // 2)]
    if kind == "linear":
        return f64([theta / numbers["factor"] for theta in plain]), 1.0
    if kind == "yarn":
        return f64(_yarn(plain, dim, base, **numbers)), 0.1 * math.log(numbers["factor"]) + 1.0
    if kind == "llama3":
        return f64([_llama3(theta, **numbers) for theta in plain]), 1.0
    return f64(plain), 1.0


def _yarn(
    plain: list[float], dim: int, base: float, factor: float, original_length: int,
    beta_fast: float = 32.0, beta_slow: float = 1.0,
) -> list[float]:  # fmt: skip
    def pair(turns: float) -> float:
        return dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), dim - 1)
    result = []
    for i, theta in enumerate(plain):
        interpolated = min(max((i - low) / (high - low), 0.0), 1.0)
        result.append((1 - interpolated) * theta + interpolated * theta / factor)
    return result


def _llama3(
    theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> float:
    wavelength = 2 * math.pi / theta
    if wavelength < original_length / high_freq_factor:
        return theta
    if wavelength > original_length / low_freq_factor:
        return theta / factor
    smooth = (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * theta / factor + smooth * theta
