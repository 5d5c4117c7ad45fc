"""Attention as it is written, with all its scores at once: on NumPy, and on CuPy."""

from __future__ import annotations

import importlib
import math
from typing import Any

from ..backend import Array
from ._case import Case
from ._contestant import Contestant, Peer, Results

__all__ = ["PlainCupy", "PlainNumpy"]


class PlainNumpy(Peer):
    """The formula in NumPy."""

    name = "plain-numpy"
    library = "numpy"

    def scores_held(self, case: Case) -> int:
        """Count the scores and each line's result; measured."""
        return 4 if case.what == "forward" else 5

    def contestant(self, case: Case, device: str, threads: int) -> Contestant:
        """Prepare the mask too, once."""
        xp = importlib.import_module(self.library)
        inputs = {name: xp.asarray(x, dtype=case.dtype) for name, x in case.inputs().items()}
        n_q, n_k = case.shape.n_q, case.shape.n_k
        mask = xp.tril(xp.ones((n_q, n_k), dtype=bool)) if case.causal else None

        def run() -> dict[str, Array]:
            results = attention(xp, mask, **inputs, backward=case.what == "both")
            self.wait(xp)
            return results

        def fetch(results: dict[str, Array]) -> Results:
            return {name: self.to_host(x) for name, x in results.items()}

        return Contestant(run, fetch)

    def wait(self, xp: Any) -> None:
        """NumPy computes at once."""

    def to_host(self, x: Array) -> Any:
        """Return a NumPy array."""
        return x


class PlainCupy(PlainNumpy):
    """The formula in CuPy."""

    name = "plain-cupy"
    library = "cupy"
    extra = "cuda13x"
    dtypes = ("float16", "float32", "float64")
    devices = ("cuda",)

    def missing(self) -> str | None:
        """CuPy needs a device as well."""
        if (reason := super().missing()) is not None:
            return reason
        import cupy

        try:
            cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            return f"cupy has no device: {error}"
        return None

    def version(self) -> str:
        """Ask the module: the package's name says which CUDA it is for."""
        import cupy

        return str(cupy.__version__)

    def contestant(self, case: Case, device: str, threads: int) -> Contestant:
        """Make everything on the device."""
        import cupy

        with cupy.cuda.Device(int(device.partition(":")[2] or 0)):
            return super().contestant(case, device, threads)

    def wait(self, xp: Any) -> None:
        """Wait for the stream."""
        xp.cuda.get_current_stream().synchronize()

    def to_host(self, x: Array) -> Any:
        """Fetch from the device, in float32 at least."""
        host = x.get()
        return host.astype("float32") if host.dtype == "float16" else host


def attention(
    xp: Any, mask: Array | None, q: Array, k: Array, v: Array, dout: Array, *, backward: bool
) -> dict[str, Array]:
    """Return the output, and the gradients if they are asked for; the scores are in float32 at least."""
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
