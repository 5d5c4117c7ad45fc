"""Attention by the plain formula, with an array of all scores, in NumPy and CuPy."""

from __future__ import annotations

import importlib
import math
from functools import partial
from typing import Any

from ..backend import Array
from ._case import Case
from ._contestant import Contestant, contestant, index_of

__all__ = ["cupy_fault", "on_cupy", "on_numpy"]


def on_numpy(case: Case, device: str, threads: int) -> Contestant:
    """Prepare the formula in NumPy."""
    return contestant(*_prepared("numpy", case), lambda x: x)


def on_cupy(case: Case, device: str, threads: int) -> Contestant:
    """Prepare the formula in CuPy."""
    cuda: Any = importlib.import_module("cupy").cuda
    with cuda.Device(index_of(device)):
        call, inputs = _prepared("cupy", case)
    return contestant(call, inputs, lambda x: x.get(), lambda results: cuda.get_current_stream().synchronize())


def cupy_fault() -> str | None:
    """Return why CuPy has no device, or None."""
    try:
        importlib.import_module("cupy").cuda.runtime.getDeviceCount()
    except Exception as error:  # the library's own
        return f"cupy has no device: {error}"
    return None


def _prepared(library: str, case: Case) -> tuple[Any, dict[str, Array]]:
    xp = importlib.import_module(library)
    mask = xp.tril(xp.ones((case.shape.n_q, case.shape.n_k), dtype=bool)) if case.causal else None
    inputs = {name: xp.asarray(x, dtype=case.dtype) for name, x in case.inputs().items()}
    return partial(attention, xp, mask, backward=case.what == "both"), inputs


def attention(
    xp: Any, mask: Array | None, q: Array, k: Array, v: Array, dout: Array, *, backward: bool
) -> dict[str, Array]:
    """Return the output, and the gradients if ``backward``; the scores are in float32 at least."""
    scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ xp.swapaxes(k, -1, -2) * scale  # (…, H, n_q, n_k)
    if scores.dtype == "float16":
        scores = scores.astype("float32")
    if mask is not None:
        scores = xp.where(mask, scores, -xp.inf)
    exp = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = (exp / xp.sum(exp, axis=-1, keepdims=True)).astype(q.dtype)
    results = {"out": weights @ v}
    if backward:
        dweights = dout @ xp.swapaxes(v, -1, -2)
        dscores = weights * (dweights - xp.sum(dweights * weights, axis=-1, keepdims=True))
        results["dq"] = dscores @ k * scale
        results["dk"] = xp.swapaxes(dscores, -1, -2) @ q * scale
        results["dv"] = xp.swapaxes(weights, -1, -2) @ dout
    return results
