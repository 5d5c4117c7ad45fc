"""The compiled kernels: two of our own, for few queries and for many, and the generic kernel for the rest."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import numpy as np

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics

__all__ = ["DirectKernel", "JitKernel", "ScanKernel"]

LIMIT = 2**29
"""Positions are int32; sums of three of these still fit."""
FEW = 16
"""Rows of a key head whose scores with all keys are few beside the keys."""


class JitKernel:
    """:class:`polyattn.backend.TiledKernel` as two compiled functions; its loop over tiles is a ``lax.scan``."""

    name = "jit"
    traced: tuple[str, ...] = ("scale", "softcap")
    """The numbers of a problem that a compiled function takes as operands: another one compiles nothing."""

    def supports(self, problem: Problem) -> str | None:
        """Support everything."""
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Run the compiled forward."""
        kernel = self._for(q=q, k=k, v=v)
        arrays, static = _split(problem, kernel.traced)
        out, statistics = _compiled(kernel.name, "forward", static)(arrays, q, k, v)
        return out, statistics

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Run the compiled backward."""
        kernel = self._for(q=q, k=k, v=v)
        arrays, static = _split(problem, kernel.traced)
        operands = (dout, dlse, q, k, v, out, statistics)
        return AttentionGrads(*_compiled(kernel.name, "backward", static)(arrays, *operands))

    def _for(self, **arrays: Array) -> JitKernel:
        """Return the kernel for where the arrays lie: over several devices the generic one.

        XLA divides its batch and head axes among them. The others loop over these, so that XLA would bring the
        whole to each device.
        """
        from ._placed import spread

        return JitKernel() if spread(**arrays) else self


class ScanKernel(JitKernel):
    """Two compiled functions of JAX's own (``_scan.py``), for problems without a bias and without dropout."""

    name = "scan"
    traced = ("scale", "softcap", "q_offset", "key_lengths")

    def supports(self, problem: Problem) -> str | None:
        """Leave to the generic kernel what has a gradient or random bits for each pair of a query and a key."""
        if problem.bias is not None:
            return "it has a bias, whose gradient the scan does not compute"
        if problem.structured:
            return "a structured mask is left to the generic kernel, which skips its tiles"
        if problem.dropout:
            return "it has dropout, whose bits the scan does not draw"
        return None


class DirectKernel(ScanKernel):
    """The scan's problems where queries are few, as when decoding (``_direct.py``); the backward is the scan's."""

    name = "direct"

    def supports(self, problem: Problem) -> str | None:
        """Leave many queries to the scan."""
        sizes = problem.sizes
        if sizes.n_q * (sizes.heads // max(sizes.kv_heads, 1)) > FEW:  # there may be no head at all
            return f"it is for at most {FEW} queries of a key head, each query head's counted"
        return super().supports(problem)


def _split(problem: Problem, traced: tuple[str, ...]) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """Return a problem's operands by name, and everything else as something that can be looked up."""
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    if problem.reach == (None, None) and not problem.structured:
        values["q_offset"] = 0  # nothing looks at it
    if isinstance(problem.seed, int) and -(2**31) <= problem.seed < 2**31:  # a new one at each step compiles nothing
        values["seed"] = np.asarray(problem.seed, dtype=np.int32)
    for name in traced:
        if isinstance(values[name], int) and abs(values[name]) <= LIMIT:
            values[name] = np.asarray(values[name], dtype=np.int32)
    arrays = {name: x for name, x in values.items() if hasattr(x, "shape") or (name in traced and isinstance(x, float))}
    return arrays, tuple((name, x) for name, x in values.items() if name not in arrays)


@functools.lru_cache(maxsize=1024)
def _compiled(kernel: str, direction: str, static: tuple[tuple[str, Any], ...]) -> Any:
    import jax

    from . import _direct, _scan
    from ._passes import GENERIC, Passes

    own = {DirectKernel.name: _direct, ScanKernel.name: _scan}
    return jax.jit(getattr(Passes(own.get(kernel, GENERIC), static), direction))
