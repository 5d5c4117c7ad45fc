"""The layer, its optimiser and its training step; the same code on every backend."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from .. import functional, optim, registry
from ..backend import Array, dtype_name
from ..conversion import to_backend
from ..distributed._gradients import Gradients
from ..errors import CheckpointError
from ..layers import MultiHeadAttention
from ._config import Config
from ._processes import Processes
from ._samples import Pairs
from ._workers import Workers

__all__ = ["Arrays", "Model", "inverse_sqrt"]

Arrays = dict[str, Array]
Team = Processes | Workers
Step = Callable[[Arrays, Arrays, Array, Array], tuple[Arrays, Arrays, Array]]
Slope = Callable[[Arrays, Array, Array], Gradients]
Update = Callable[[Arrays, Arrays, dict[str, Array]], tuple[Arrays, Arrays]]

CLIP = 1.0


class Model:
    """Multi-head attention with the settings of a run, on a backend and a device."""

    def __init__(self, config: Config, backend: str, device: str | None, team: Team | None = None) -> None:
        self.config, self.backend = config, registry.ready(backend)
        self._layer = MultiHeadAttention(
            config.width, config.heads, seed=config.seed, dtype=config.dtype, backend=backend, device=device
        )
        self.device = self._layer.device
        self.schedule = inverse_sqrt(config.learning_rate)
        self._optimiser = optim.AdamW(self.schedule, weight_decay=config.weight_decay)
        self._team: Team = Processes() if team is None else team
        self._gradients, self._update = _gradients(self._layer), _update(self._optimiser)
        self._together = self.backend.jit(_together(self._gradients, self._update))
        self._update = self.backend.jit(self._update)
        if isinstance(self._team, Processes):  # a compiled function does not go to another process
            self._gradients = self.backend.jit(self._gradients)

    def share(self, pairs: Pairs) -> tuple[Array, Array, float]:
        """Return this process's samples of a batch on the backend, and their part of it."""
        (x, y), part = self._team.share(pairs)
        return self.native(x), self.native(y), part

    def step(
        self, params: Arrays, state: Arrays, x: Array, y: Array, part: float = 1.0
    ) -> tuple[Arrays, Arrays, Array]:  # fmt: skip
        """Return the parameters and the optimiser state after a step, and the loss before it.

        ``x`` and ``y`` are this process's part of the batch.
        """
        if self._team.alone:
            return self._together(params, state, x, y)  # type: ignore[no-any-return]  # jit's result
        found = self._team.gradients(self._gradients, params, x, y, part, self.native)
        return *self._update(params, state, found.grads), found.loss

    def start(self) -> tuple[Arrays, Arrays]:
        """Return the initial parameters and optimiser state."""
        params = self._layer.parameters()
        return params, self._optimiser.init(params)

    def fitted(self, what: str, stored: Mapping[str, np.ndarray[Any, Any]], expected: Arrays) -> Arrays:
        """Return stored arrays on the backend; raise if names, shapes or dtypes differ from the expected ones."""
        kinds, wanted = (
            {name: (tuple(x.shape), dtype_name(x.dtype)) for name, x in d.items()} for d in (stored, expected)
        )
        if differing := sorted(name for name in {**kinds, **wanted} if kinds.get(name) != wanted.get(name)):
            raise CheckpointError(
                f"the checkpoint's {what} do not fit the layer that its settings describe; they differ in "
                f"{', '.join(differing)}; use an undamaged checkpoint, or start a new run"
            )
        return {name: to_backend(stored[name], self.backend.name, self.device) for name in expected}

    def native(self, x: np.ndarray[Any, Any]) -> Array:
        """Return samples on the backend, in the dtype of the run."""
        dtype = self.config.dtype
        host = np.asarray(x, dtype="float32" if dtype == "bfloat16" else dtype, order="C")
        there = to_backend(host, self.backend.name, self.device)
        # NumPy has no bfloat16.
        return there if dtype != "bfloat16" else self.backend.namespace().astype(there, self.backend.dtype(dtype))

    def predict(self, params: Arrays, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the layer's output for samples ``(samples, sequence, width)``."""
        return self.backend.to_numpy(self._layer.with_parameters(params)(self.native(x)))

    def attention_weights(self, params: Arrays, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the weights ``(samples, heads, sequence, sequence)``."""
        weights = self._layer.with_parameters(params).attention_weights(self.native(x))
        return np.asarray(self.backend.to_numpy(weights), dtype=np.float64)

    def fetch(self, scalars: list[Array]) -> np.ndarray[Any, Any]:
        """Return 0-d arrays as float64 NumPy numbers, in one transfer."""
        return np.asarray(self.backend.to_numpy(self.backend.namespace().stack(scalars)), dtype=np.float64)

    def finite(self, params: Arrays) -> bool:
        """Say whether all parameters are finite."""
        return all(bool(np.all(np.isfinite(self.backend.to_numpy(x)))) for x in params.values())


@dataclass(frozen=True)
class inverse_sqrt:
    """A linear warm-up, then decay with 1 / √step. It does not depend on the last step, so a run can be continued.

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


def _gradients(layer: Any) -> Slope:
    """Return ``loss, grads = gradients(params, x, y)`` for a layer's architecture."""

    def gradients(params: Arrays, x: Array, y: Array) -> Gradients:
        model = layer.with_parameters(params)
        prediction, cache = model.forward(x)
        loss, loss_cache = functional.mse_loss_forward(prediction, y)
        dloss = array_namespace(loss).ones_like(loss)
        dprediction = functional.mse_loss_backward(dloss, loss_cache).prediction
        _, grads = model.backward(dprediction, cache, inputs=False)
        return Gradients(loss, grads)

    return gradients


def _update(optimiser: optim.AdamW) -> Update:
    """Return ``params, state = update(params, state, grads)``."""

    def update(params: Arrays, state: Arrays, grads: dict[str, Array]) -> tuple[Arrays, Arrays]:
        grads, _ = optim.clip_by_global_norm(grads, CLIP)
        return optimiser.update(grads, state, params)

    return update


def _together(gradients: Slope, update: Update) -> Step:
    """Return ``params, state, loss = step(params, state, x, y)``, which one compiler sees as a whole."""

    def step(params: Arrays, state: Arrays, x: Array, y: Array) -> tuple[Arrays, Arrays, Array]:
        loss, grads = gradients(params, x, y)
        return *update(params, state, grads), loss

    return step
