"""polyattn itself, on the chosen backend: as it is called, and as a whole compiled by the backend's own compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import __version__, functional, optim, registry
from ..backend import Array, Backend
from ..conversion import to_backend
from ..kernels import FLOAT_DTYPES
from ..layers import MultiHeadAttention
from ._case import Case
from ._contestant import NO_GRADIENT, OPTIMISER, Contestant, Peer, Results

__all__ = ["Ours"]

Arrays = dict[str, Array]


class Ours(Peer):
    """polyattn on one backend and its arrays."""

    tasks = ("attention", "layer", "train")
    dtypes = FLOAT_DTYPES

    def __init__(self, backend: str, *, compiled: bool = False) -> None:
        self.native = registry.ready(backend)
        self.library = self.native.name  # type: ignore[misc]  # of a peer these are its class's
        self.compiled = compiled
        self.name = "polyattn-jit" if compiled else "polyattn"  # type: ignore[misc]

    def missing(self) -> str | None:
        """Say whether the backend has a compiler at all."""
        if self.compiled and type(self.native).jit is Backend.jit:
            return f"the backend {self.native.name} compiles nothing"
        return None

    def version(self) -> str:
        """Return polyattn's own release."""
        return __version__

    def unsuited(self, case: Case, device: str) -> str | None:
        """Refuse a training step, which is compiled anyway: there is no second way to time it."""
        return "a training step is compiled anyway" if self.compiled and case.task == "train" else None

    def contestant(self, case: Case, device: str, threads: int) -> Contestant:
        """Place the inputs and choose the function."""
        native = self.native
        inputs = {name: self._placed(x, case, device) for name, x in case.inputs().items()}
        if case.task == "attention":
            call = _attention(case)
        else:
            layer = MultiHeadAttention(
                case.shape.d_model, case.shape.heads, seed=0, dtype=case.dtype, backend=native.name, device=device
            )
            call = _training(layer, native, case) if case.task == "train" else _layer(layer, case)
        if self.compiled:
            call = native.jit(call)

        def run() -> Arrays:
            results = call(**inputs)
            native.synchronize(*results.values())
            return results

        def fetch(results: Arrays) -> Results:
            wide: Any = np.float64 if case.dtype == "float64" else np.float32
            return {name: np.array(native.to_numpy(x), dtype=wide) for name, x in results.items() if _kept(name)}

        return Contestant(run, fetch)

    def _placed(self, x: Array, case: Case, device: str) -> Array:
        there = to_backend(x, self.native.name, device)
        wanted = self.native.dtype(case.dtype)
        return there if there.dtype == wanted else self.native.namespace().astype(there, wanted)


def _attention(case: Case) -> Callable[..., Arrays]:
    causal = case.causal

    def forward(q: Array, k: Array, v: Array, dout: Array) -> Arrays:
        return {"out": functional.attention(q, k, v, causal=causal)}

    def both(q: Array, k: Array, v: Array, dout: Array) -> Arrays:
        out, cache = functional.attention_forward(q, k, v, causal=causal)
        grads = functional.attention_backward(dout, cache)
        return {"out": out, "dq": grads.q, "dk": grads.k, "dv": grads.v}

    return forward if case.what == "forward" else both


def _layer(layer: MultiHeadAttention, case: Case) -> Callable[..., Arrays]:
    causal = case.causal

    def forward(x: Array, dy: Array) -> Arrays:
        return {"y": layer(x, causal=causal)}

    def both(x: Array, dy: Array) -> Arrays:
        y, cache = layer.forward(x, causal=causal)
        inputs, grads = layer.backward(dy, cache)
        return {"y": y, "dx": inputs.query} | {f"d{name}": gradient for name, gradient in grads.items()}

    return forward if case.what == "forward" else both


def _training(layer: MultiHeadAttention, native: Backend, case: Case) -> Callable[..., Arrays]:
    """Return a step that goes on from where the last one ended: forward, mean squared error, backward, AdamW."""
    optimiser = optim.AdamW(**OPTIMISER)  # type: ignore[arg-type]  # the values of the dict have several types
    params = layer.parameters()
    now = {"params": params, "state": optimiser.init(params)}

    def step(params: Arrays, state: Arrays, x: Array, target: Array) -> tuple[Arrays, Arrays]:
        model = layer.with_parameters(params)
        y, cache = model.forward(x, causal=case.causal)
        loss, loss_cache = functional.mse_loss_forward(y, target)
        dy = functional.mse_loss_backward(native.namespace().ones_like(loss), loss_cache).prediction
        _, grads = model.backward(dy, cache, inputs=False)
        return optimiser.update(grads, state, params)

    compiled = native.jit(step)

    def call(x: Array, target: Array) -> Arrays:
        now["params"], now["state"] = compiled(now["params"], now["state"], x, target)
        return now["params"]

    return call


def _kept(name: str) -> bool:
    return not name.endswith(NO_GRADIENT)
