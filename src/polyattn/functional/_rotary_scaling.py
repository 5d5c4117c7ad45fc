"""Scalings of a rotary embedding's frequencies, for contexts longer than the model was trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ._checks import is_number, shown

__all__ = ["LinearScaling", "Llama3Scaling", "NTKScaling", "RotaryScaling", "YaRNScaling"]


@dataclass(frozen=True)
class RotaryScaling:
    """The base class of the scalings of :func:`rotary_embedding`; it scales nothing itself.

    To write another scaling, derive a frozen dataclass and override :meth:`frequencies`, and :attr:`magnitude` if it
    is not 1. For torch.compile its fields must be numbers, strings, tuples or lists.
    """

    def frequencies(self, dim: int, base: float) -> NDArray[np.float64]:
        """Return the angle between neighbouring positions for each of the dim / 2 pairs: base^(−2i / dim)."""
        return np.asarray(base ** (-np.arange(0, dim, 2) / dim))

    @property
    def magnitude(self) -> float:
        """The factor of the rotated features; queries and keys both have it, so scores are multiplied by its square."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Position interpolation: every frequency divided by ``factor``.

    Chen et al., "Extending context window of large language models via positional interpolation" (2023).
    """

    factor: float

    def __post_init__(self) -> None:
        _at_least_one("factor", self.factor)

    def frequencies(self, dim: int, base: float) -> NDArray[np.float64]:
        """Return base^(−2i / dim) / factor."""
        return super().frequencies(dim, base) / self.factor


@dataclass(frozen=True)
class NTKScaling(RotaryScaling):
    """NTK-aware scaling: base · factor^(dim / (dim − 2)), so that only the lowest frequency is divided by ``factor``.

    u/bloc97, "NTK-aware scaled RoPE" (2023); equation 16 of the YaRN paper.
    """

    factor: float

    def __post_init__(self) -> None:
        _at_least_one("factor", self.factor)

    def frequencies(self, dim: int, base: float) -> NDArray[np.float64]:
        """Return the frequencies of the larger base."""
        # For dim 2 the only pair has frequency 1 for every base.
        return super().frequencies(dim, base * self.factor ** (dim / (dim - 2)) if dim > 2 else base)


@dataclass(frozen=True)
class YaRNScaling(RotaryScaling):
    """YaRN: high frequencies are kept, low frequencies interpolated, with a linear ramp between them.

    Peng et al., "YaRN: efficient context window extension of large language models" (2023), section 3.

    Parameters
    ----------
    factor : float
        The new context length divided by the original one.
    original_length : int
        The number of positions on which the model was trained.
    beta_fast, beta_slow : float
        A frequency is kept if it makes at least ``beta_fast`` revolutions over the original length, and fully
        interpolated if it makes at most ``beta_slow``.
    attention_factor : float, optional
        The factor of queries and keys; the default, 0.1 · ln(factor) + 1, is the paper's.
    truncate : bool
        Round the ends of the ramp outwards to whole pairs, as the authors' code does.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _at_least_one("factor", self.factor)
        _positive(original_length=self.original_length, beta_fast=self.beta_fast, beta_slow=self.beta_slow)
        if self.beta_fast <= self.beta_slow:
            raise ArgumentError(f"beta_fast: expected more than beta_slow={self.beta_slow}, got {self.beta_fast}")
        if self.attention_factor is not None:
            _positive(attention_factor=self.attention_factor)

    def frequencies(self, dim: int, base: float) -> NDArray[np.float64]:
        """Return θ · (ramp / factor + 1 − ramp), where ramp rises from 0 at beta_fast's pair to 1 at beta_slow's."""
        plain = super().frequencies(dim, base)
        low, high = (self._pair_with(beta, dim, base) for beta in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
        return np.asarray(plain * (ramp / self.factor + 1 - ramp))

    @property
    def magnitude(self) -> float:
        """The attention factor; by default 0.1 · ln(factor) + 1."""
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    def _pair_with(self, revolutions: float, dim: int, base: float) -> float:
        """Return the (fractional) index of the pair that makes this many revolutions over the original length."""
        return dim * math.log(self.original_length / (revolutions * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Llama 3: short wavelengths are kept, frequencies of long ones divided by ``factor``, with a smooth transition.

    Grattafiori et al., "The Llama 3 herd of models" (2024), as in the model's code; the defaults are Llama 3.1's.

    Parameters
    ----------
    factor : float
        The divisor of low frequencies.
    low_freq_factor, high_freq_factor : float
        A wavelength above ``original_length / low_freq_factor`` is long, one below
        ``original_length / high_freq_factor`` short.
    original_length : int
        The number of positions on which the model was trained.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192

    def __post_init__(self) -> None:
        _at_least_one("factor", self.factor)
        _positive(
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            original_length=self.original_length,
        )
        if self.high_freq_factor <= self.low_freq_factor:
            raise ArgumentError(
                f"high_freq_factor: expected more than low_freq_factor={self.low_freq_factor}, "
                f"got {self.high_freq_factor}"
            )

    def frequencies(self, dim: int, base: float) -> NDArray[np.float64]:
        """Return θ · (smooth + (1 − smooth) / factor), smooth from 0 at long wavelengths to 1 at short ones."""
        plain = super().frequencies(dim, base)
        revolutions = self.original_length * plain / (2 * math.pi)  # the original length over the wavelength
        smooth = np.clip((revolutions - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return np.asarray(plain * (smooth + (1 - smooth) / self.factor))


def _at_least_one(name: str, x: Any) -> None:
    if not (is_number(x) and 1 <= x < math.inf):
        raise ArgumentError(f"{name}: expected a finite number that is at least 1, got {shown(x)}")


def _positive(**numbers: Any) -> None:
    for name, x in numbers.items():
        if not (is_number(x) and 0 < x < math.inf):
            raise ArgumentError(f"{name}: expected a positive number, got {shown(x)}")
