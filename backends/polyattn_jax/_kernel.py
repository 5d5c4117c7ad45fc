"""The compiled kernels: ``native`` on the CPU, ``direct`` for few queries, ``scan`` for many, and the generic one."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics, Structure, flatten, in_tiles_of
from polyattn_native import refusal, thread_count

__all__ = ["DirectKernel", "JitKernel", "NativeKernel", "ScanKernel"]

LIMIT = 2**29
"""Positions are int32 within ±LIMIT; sums of three of them fit."""
FEW = 16
"""The most rows of a key head for which all scores take little memory compared with the keys."""


class JitKernel:
    """:class:`polyattn.backend.TiledKernel` as two compiled functions; its loop over tiles is a ``lax.scan``.

    ``tile`` is the generic kernel's, which also computes what another kernel is in doubt of.
    """

    name = "jit"
    traced: tuple[str, ...] = ("scale", "softcap")
    """The numbers of a problem that are operands of the compiled function: a new value compiles nothing."""

    def __init__(self, tile: tuple[int, int] | None = None) -> None:
        self.tile = tile

    def supports(self, problem: Problem) -> str | None:
        """Support everything."""
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Run the compiled forward."""
        kernel = self._for(q=q, k=k, v=v)
        arrays, structure = _flat(in_tiles_of(self, problem), kernel.traced)
        out, statistics = _compiled(kernel.name, "forward", structure)(arrays, q, k, v)
        return out, statistics

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Run the compiled backward."""
        kernel = self._for(q=q, k=k, v=v)
        arrays, structure = _flat(in_tiles_of(self, problem), kernel.traced)
        operands = (dout, dlse, q, k, v, out, statistics)
        return AttentionGrads(*_compiled(kernel.name, "backward", structure)(arrays, *operands))

    def _for(self, **arrays: Array) -> JitKernel:
        """Return the kernel for these arrays: the generic one if they are sharded over several devices.

        XLA partitions the batch and head axes of the generic kernel. The other kernels loop over these axes, so XLA
        would gather the whole arrays on each device.
        """
        from ._placed import spread

        return JitKernel() if spread(**arrays) else self


class ScanKernel(JitKernel):
    """Two compiled functions written for JAX (``_scan.py``), for problems without bias and dropout."""

    name = "scan"
    traced = ("scale", "softcap", "q_offset", "key_lengths")

    def supports(self, problem: Problem) -> str | None:
        """Refuse bias, structured masks and dropout."""
        if problem.bias is not None:
            return "it has a bias, whose gradient the scan does not compute"
        if problem.structured:
            return "a structured mask is left to the generic kernel, which skips its tiles"
        if problem.dropout:
            return "it has dropout, whose bits the scan does not draw"
        return None


class DirectKernel(ScanKernel):
    """The problems of the scan with few queries, as in decoding (``_direct.py``); the backward is that of the scan."""

    name = "direct"

    def supports(self, problem: Problem) -> str | None:
        """Refuse many queries, which the scan computes."""
        sizes = problem.sizes
        if sizes.n_q * (sizes.heads // max(sizes.kv_heads, 1)) > FEW:  # kv_heads may be 0
            return f"it is for at most {FEW} queries of a key head, each query head's counted"
        return super().supports(problem)


class NativeKernel(JitKernel):
    """Two compiled functions that call polyattn's native library on the CPU (``_native.py``)."""

    name = "native"
    traced = ("scale", "softcap", "q_offset", "key_lengths")

    def supports(self, problem: Problem) -> str | None:
        """Support what the library can compute, if there is one for this machine, and programs run on the CPU."""
        from ._foreign import missing, platform

        reason = missing() or refusal(problem)
        if reason is None and problem.device is None and platform() != "cpu":
            return f"the native library computes on the CPU, and traced arrays are on {platform()}"
        if reason is None:
            thread_count("jax")  # or its error: the library itself ignores a value that is no number
        return reason


def _flat(problem: Problem, traced: tuple[str, ...]) -> tuple[tuple[Array, ...], Structure]:
    """Return the arrays of a problem, and its structure, which is the key of the compiled function."""
    values: dict[str, Any] = {name: getattr(problem, name) for name in traced}
    if problem.reach == (None, None) and not problem.structured:
        values["q_offset"] = 0  # unused
    if isinstance(problem.seed, int) and -(2**31) <= problem.seed < 2**31:  # an operand: a new seed compiles nothing
        values["seed"] = np.asarray(problem.seed, dtype=np.int32)
    for name in traced:
        x = values[name]
        if isinstance(x, float):
            values[name] = np.asarray(x, dtype="float64" if problem.dtype == "float64" else "float32")
        elif isinstance(x, int) and abs(x) <= LIMIT:
            values[name] = np.asarray(x, dtype=np.int32)
    return flatten(replace(problem, **values))


@functools.lru_cache(maxsize=1024)
def _compiled(kernel: str, direction: str, structure: Structure) -> Any:
    import jax

    from . import _direct, _native, _scan
    from ._passes import GENERIC, Passes

    own = {NativeKernel.name: _native, DirectKernel.name: _direct, ScanKernel.name: _scan}
    return jax.jit(getattr(Passes(own.get(kernel, GENERIC), structure), direction))
