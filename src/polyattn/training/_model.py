"""The layer, its optimiser and its step on one backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import optim, registry
from ..backend import Array, dtype_name
from ..conversion import to_backend
from ..errors import CheckpointError
from ..layers import MultiHeadAttention
from ._config import Config
from ._step import Arrays, inverse_sqrt, make_step

__all__ = ["Model"]


class Model:
    """Multi-head attention as the settings describe it, on a backend and a device."""

    def __init__(self, config: Config, backend: str, device: str | None) -> None:
        self.config, self.backend = config, registry.ready(backend)
        self._layer = MultiHeadAttention(
            config.width, config.heads, seed=config.seed, dtype=config.dtype, backend=backend, device=device
        )
        self.device = self._layer.device
        self.schedule = inverse_sqrt(config.learning_rate)
        self._optimiser = optim.AdamW(self.schedule, weight_decay=config.weight_decay)
        self.step = self.backend.jit(make_step(self._layer, self._optimiser))

    def start(self) -> tuple[Arrays, Arrays]:
        """Return the initial parameters and optimiser state."""
        params = self._layer.parameters()
        return params, self._optimiser.init(params)

    def fitted(self, what: str, stored: Mapping[str, np.ndarray[Any, Any]], expected: Arrays) -> Arrays:
        """Return stored arrays on the backend, or raise where names, shapes or dtypes are not the expected ones."""
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
        # NumPy itself has no bfloat16.
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
