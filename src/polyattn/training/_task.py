"""The pointer-copy task: find the row with the largest first feature, and copy it to every position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Pairs", "PointerCopy", "generator"]

Pairs = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Inputs and targets, both (samples, sequence, width)."""

TRAINING, HELD_OUT, ORDER = range(3)  # what a random stream is for


@dataclass(frozen=True)
class PointerCopy:
    """Sequences of standard normal rows, float64 and the same on every backend."""

    sequence: int
    width: int
    samples: int
    seed: int
    evaluated_on: str = "held-out samples"

    def batch(self, step: int) -> Pairs:
        """Return the samples of a step; a pure function, so that a resumed run continues exactly."""
        return self._draw(self.samples, TRAINING, step)

    def evaluation(self) -> Pairs:
        """Return 1024 samples that no step trains on."""
        return self._draw(1024, HELD_OUT, 0)

    def _draw(self, samples: int, stream: int, index: int) -> Pairs:
        x = generator(self.seed, stream, index).standard_normal((samples, self.sequence, self.width))
        rows = x[np.arange(samples), np.argmax(x[:, :, 0], axis=1)]  # (samples, width)
        return x, np.broadcast_to(rows[:, None, :], x.shape)


def generator(seed: int, stream: int, index: int) -> np.random.Generator:
    """Return the random generator of one purpose and one step or epoch."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, index))))
