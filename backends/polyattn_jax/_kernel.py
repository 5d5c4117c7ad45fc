"""The generic kernel compiled by ``jax.jit``, once for each kind of problem, also where the caller runs eagerly."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any

import numpy as np

from polyattn.backend import Array, Problem, TiledKernel

__all__ = ["JitKernel"]

TILED = TiledKernel()


class JitKernel:
    """:class:`polyattn.backend.TiledKernel` as two compiled functions; its loop over tiles is a ``lax.scan``."""

    name = "jit"

    def supports(self, problem: Problem) -> str | None:
        """Support everything."""
        return None

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, Array]:
        """Run the compiled forward."""
        arrays, static = _split(problem)
        out, lse = _compiled("forward", static)(arrays, q, k, v)
        return out, lse

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, lse: Array, problem: Problem
    ) -> tuple[Array, Array, Array, Array | None, Array | None]:
        """Run the compiled backward."""
        arrays, static = _split(problem)
        dq, dk, dv, dbias, dsinks = _compiled("backward", static)(arrays, dout, dlse, q, k, v, out, lse)
        return dq, dk, dv, dbias, dsinks


def _split(problem: Problem) -> tuple[dict[str, Array], tuple[tuple[str, Any], ...]]:
    """Return a problem's arrays by name, and everything else as something that can be looked up."""
    values = {field.name: getattr(problem, field.name) for field in fields(problem)}
    if isinstance(problem.seed, int) and -(2**31) <= problem.seed < 2**31:  # a new one at each step compiles nothing
        values["seed"] = np.asarray(problem.seed, dtype=np.int32)
    arrays = {name: x for name, x in values.items() if hasattr(x, "shape")}
    return arrays, tuple((name, x) for name, x in values.items() if name not in arrays)


@functools.lru_cache(maxsize=1024)
def _compiled(direction: str, static: tuple[tuple[str, Any], ...]) -> Any:
    import jax

    problem = Problem(**dict(static))
    run = getattr(TILED, direction)
    return jax.jit(lambda arrays, *operands: run(*operands, replace(problem, **arrays)))
