"""One training step: forward, backward, clip, update, the same code on every backend."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from .. import functional, optim
from ..backend import Array

__all__ = ["Step", "inverse_sqrt", "make_step"]

Arrays = dict[str, Array]
Step = Callable[[Arrays, Arrays, Array, Array], tuple[Arrays, Arrays, Array]]

CLIP = 1.0


@dataclass(frozen=True)
class inverse_sqrt:
    """A linear rise, then a fall with the square root of the step: it needs no last step, so a run can be lengthened.

    ``peak · min((step + 1) / warmup, √(warmup / (step + 1)))``

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 5.3, with the peak in place of ``d_model``.
    """

    peak: float
    warmup: int = 200

    def __call__(self, step: Any) -> Any:
        """Return the rate after ``step`` updates: a float for a number, a 0-d array for a 0-d array."""
        if isinstance(step, numbers.Real):
            return float(self(np.asarray(step, dtype=np.float64)))
        xp = array_namespace(step)
        now = (step + 1.0) / self.warmup
        return xp.minimum(now, 1.0 / xp.sqrt(now)) * self.peak


def make_step(layer: Any, optimiser: optim.AdamW) -> Step:
    """Return ``params, state, loss = step(params, state, x, y)`` for a layer's architecture."""

    def step(params: Arrays, state: Arrays, x: Array, y: Array) -> tuple[Arrays, Arrays, Array]:
        model = layer.with_parameters(params)
        prediction, cache = model.forward(x)
        loss, loss_cache = functional.mse_loss_forward(prediction, y)
        dloss = array_namespace(loss).ones_like(loss)
        dprediction = functional.mse_loss_backward(dloss, loss_cache).prediction
        _, grads = model.backward(dprediction, cache, inputs=False)
        grads, _ = optim.clip_by_global_norm(grads, CLIP)
        params, state = optimiser.update(grads, state, params)
        return params, state, loss

    return step
