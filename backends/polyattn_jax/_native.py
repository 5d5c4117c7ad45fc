"""Attention on the CPU by polyattn's native library, and by another kernel of JAX where the library is in doubt.

The arguments of a call may have mapped axes in front: those of ``jax.vmap``, of length 1 in an array that is not
mapped. They are batch axes of the library's call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics, Structure, flatten

from . import _direct, _scan
from ._kernel import DirectKernel, ScanKernel
from ._native_call import by_library, each
from ._passes import GENERIC
from ._placed import replaced

__all__ = ["backward", "forward"]

BATCH_AXES = 4
"""The most batch axes of the library that are longer than 1."""
ONE_FOR_ALL = ("scale", "softcap", "seed", "sinks")
"""The library takes one for the whole batch."""

Arrays = tuple[Array, ...]
Inputs = dict[str, Any]
"""The problem and the arrays of a forward or a backward."""
Shape = tuple[int, ...]


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return ``(out, statistics)`` as the kernel contract defines them."""
    out, *statistics = _run({"problem": problem, "q": q, "k": k, "v": v})
    return out, RowStatistics(*statistics)


def backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
    problem: Problem,
) -> AttentionGrads:  # fmt: skip
    """Return the gradients as the kernel contract defines them."""
    results = iter(_run({
        "problem": problem, "q": q, "k": k, "v": v, "dout": dout, "dlse": dlse, "out": out,
        "largest": statistics.largest, "log_total": statistics.log_total,
    }))  # fmt: skip
    dq, dk, dv = next(results), next(results), next(results)
    return AttentionGrads(
        dq, dk, dv, None if problem.bias_array is None else next(results),
        None if problem.sinks is None else next(results),
    )  # fmt: skip


def _run(inputs: Inputs) -> Arrays:
    arrays, structure = flatten(inputs)
    results: Arrays = _mapped(structure, ())(*arrays)
    return results


def _mapped(structure: Structure, sizes: Shape) -> Callable[..., Arrays]:
    """Return a function of the arrays of inputs with mapped axes of these sizes, for which ``jax.vmap`` adds one.

    By default ``jax.vmap`` would compute the other kernel for all entries if the library is in doubt of any.
    """

    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]  # JAX is Any to the type checker
    def run(*arrays: Array) -> Arrays:
        results, valid = by_library(structure.build(arrays), sizes)
        otherwise = functools.partial(_otherwise, structure)
        return replaced(valid, results, lambda: each(otherwise, sizes, arrays))

    def over_more(size: int, is_mapped: Sequence[bool], *arrays: Array) -> tuple[Arrays, Any]:
        results: Arrays
        mapped = structure.build(is_mapped)["problem"]
        batch = (size, *sizes, *mapped.sizes.batch)
        if sum(n != 1 for n in batch) > BATCH_AXES or any(getattr(mapped, name) is True for name in ONE_FOR_ALL):
            results = _one_by_one(run, is_mapped, arrays)
        else:
            wider = [x if yes else x[None] for x, yes in zip(arrays, is_mapped, strict=True)]
            results = _mapped(structure, (size, *sizes))(*wider)
        return results, jax.tree.map(lambda _: True, results)

    run.def_vmap(over_more)
    return run  # type: ignore[no-any-return]  # JAX is Any to the type checker


def _one_by_one(run: Callable[..., Arrays], is_mapped: Sequence[bool], arrays: Sequence[Array]) -> Arrays:
    """Compute the entries of the mapped axis in a loop."""

    def at(parts: Sequence[Array]) -> Arrays:
        mine = iter(parts)
        return run(*(next(mine) if yes else x for x, yes in zip(arrays, is_mapped, strict=True)))

    found: Arrays = jax.lax.map(at, [x for x, yes in zip(arrays, is_mapped, strict=True) if yes])
    return found


def _otherwise(structure: Structure, *arrays: Array) -> Arrays:
    """Compute without the library, and without mapped axes."""
    inputs = structure.build(arrays)
    q, k, v, problem = (inputs[name] for name in ("q", "k", "v", "problem"))
    others = ((DirectKernel(), _direct), (ScanKernel(), _scan))
    kernel: Any = next((module for kernel, module in others if kernel.supports(problem) is None), GENERIC)
    if "dout" not in inputs:
        out, statistics = kernel.forward(q, k, v, problem)
        return (out, *statistics)
    statistics = RowStatistics(inputs["largest"], inputs["log_total"])
    grads = kernel.backward(inputs["dout"], inputs["dlse"], q, k, v, inputs["out"], statistics, problem)
    return tuple(dx for dx in grads if dx is not None)
