"""The pointer-copy task: find the row with the largest first feature, and copy it to every position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

__all__ = ["Data", "Pairs", "PointerCopy", "generator"]

Pairs = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

TRAINING, HELD_OUT, ORDER = range(3)  # what a random stream is for


class Data(Protocol):
    """Where a run's samples come from. Every method is a pure function, so that a resumed run goes on exactly."""

    @property
    def evaluated_on(self) -> str:
        """What the run is measured on, in words."""
        ...

    def batch(self, step: int) -> Pairs:
        """Return the inputs and targets ``(batch, sequence, width)`` of a step."""
        ...

    def evaluation(self) -> Pairs:
        """Return the inputs and targets on which the run is measured."""
        ...


@dataclass(frozen=True)
class PointerCopy:
    """Sequences of standard normal rows; the target repeats the row whose first feature is the largest."""

    sequence: int
    width: int
    samples: int
    seed: int
    evaluated_on: str = "held-out samples"

    def batch(self, step: int) -> Pairs:
        """Return the samples of a step: float64, the same on every backend."""
        return self._draw(self.samples, TRAINING, step)

    def evaluation(self) -> Pairs:
        """Return 1024 samples that no step trains on."""
        return self._draw(1024, HELD_OUT, 0)

    def _draw(self, samples: int, stream: int, index: int) -> Pairs:
        x = generator(self.seed, stream, index).standard_normal((samples, self.sequence, self.width))
        winner = np.argmax(x[:, :, 0], axis=1)  # (samples,)
        rows = x[np.arange(samples), winner]  # (samples, width)
        return x, np.broadcast_to(rows[:, None, :], x.shape)


def generator(seed: int, stream: int, index: int) -> np.random.Generator:
    """Return the random generator of one purpose and one step or epoch."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(stream, index))))
