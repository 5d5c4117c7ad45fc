"""polyattn itself: called as usual, or compiled as a whole by the backend's compiler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .. import functional, optim, registry
from ..backend import Array, Backend
from ..conversion import to_backend
from ..kernels import FLOAT_DTYPES
from ..layers import MultiHeadAttention
from ._case import Case, Inputs
from ._contestant import OPTIMISER, Contestant, Peer, contestant

__all__ = ["JITTED", "OURS", "compiles", "initial_weights", "ours"]

OURS, JITTED = "polyattn", "polyattn-jit"

Arrays = dict[str, Array]


def ours(backend: str, arrays: str | None = None, *, compiled: bool = False) -> Peer:
    """Return polyattn on a backend and the arrays of a library, by default the backend's own."""
    native, home = registry.ready(backend), registry.ready(arrays or backend)

    def fault() -> str | None:
        return f"the backend {backend} has no compiler" if compiled and not compiles(native) else None

    # A training step is always compiled, so there is no second variant to time.
    tasks = ("attention", "layer") if compiled else ("attention", "layer", "train")
    return Peer(
        JITTED if compiled else OURS, backend, partial(_prepared, native, home, compiled),
        tasks=tasks, dtypes=FLOAT_DTYPES, devices=None, fault=fault,
    )  # fmt: skip


def compiles(native: Backend) -> bool:
    """Say whether a backend has a compiler."""
    return type(native).jit is not Backend.jit


def initial_weights(case: Case) -> Inputs:
    """Return the initial parameters of a case's layer."""
    return dict(_layer(case, case.host_dtype, "numpy", None).parameters())


def _layer(case: Case, dtype: str, backend: str, device: str | None) -> MultiHeadAttention:
    shape = case.shape
    return MultiHeadAttention(shape.d_model, shape.heads, seed=0, dtype=dtype, backend=backend, device=device)


def _prepared(native: Backend, home: Backend, compiled: bool, case: Case, device: str, threads: int) -> Contestant:
    """Return the contestant: convert the inputs and choose the function."""
    dtype, astype = home.dtype(case.dtype), home.namespace().astype
    inputs = {name: to_backend(x, home.name, device) for name, x in case.inputs().items()}
    inputs = {name: x if x.dtype == dtype else astype(x, dtype) for name, x in inputs.items()}
    make = {"attention": _attention, "layer": _of_layer, "train": _training}[case.task]
    call = make(case, native, device)
    if compiled:
        call = native.jit(call)

    def to_host(x: Array) -> Any:
        return np.array(home.to_numpy(x), dtype=case.host_dtype)

    return contestant(call, inputs, to_host, lambda results: home.synchronize(*results.values()))


def _attention(case: Case, native: Backend, device: str) -> Callable[..., Arrays]:
    def call(q: Array, k: Array, v: Array, dout: Array) -> Arrays:
        if case.what == "forward":
            return {"out": functional.attention(q, k, v, causal=case.causal)}
        out, cache = functional.attention_forward(q, k, v, causal=case.causal)
        grads = functional.attention_backward(dout, cache)
        return {"out": out, "dq": grads.q, "dk": grads.k, "dv": grads.v}

    return call


def _of_layer(case: Case, native: Backend, device: str) -> Callable[..., Arrays]:
    layer = _layer(case, case.dtype, native.name, device)

    def call(x: Array, dy: Array) -> Arrays:
        if case.what == "forward":
            return {"y": layer(x, causal=case.causal)}
        y, cache = layer.forward(x, causal=case.causal)
        inputs, grads = layer.backward(dy, cache)
        return {"y": y, "dx": inputs.query} | {f"d{name}": gradient for name, gradient in grads.items()}

    return call


def _training(case: Case, native: Backend, device: str) -> Callable[..., Arrays]:
    """Return a training step with its own state: forward, mean squared error, backward, AdamW."""
    layer, optimiser = _layer(case, case.dtype, native.name, device), optim.AdamW(**OPTIMISER)
    params = layer.parameters()
    state = optimiser.init(params)

    def step(params: Arrays, state: Arrays, x: Array, target: Array) -> tuple[Arrays, Arrays]:
        model = layer.with_parameters(params)
        y, cache = model.forward(x, causal=case.causal)
        loss, loss_cache = functional.mse_loss_forward(y, target)
        dy = functional.mse_loss_backward(native.namespace().ones_like(loss), loss_cache).prediction
        _, grads = model.backward(dy, cache, inputs=False)
        return optimiser.update(grads, state, params)

    compiled: Callable[..., tuple[Arrays, Arrays]] = native.jit(step)

    def call(x: Array, target: Array) -> Arrays:
        nonlocal params, state
        params, state = compiled(params, state, x, target)
        return params

    return call
