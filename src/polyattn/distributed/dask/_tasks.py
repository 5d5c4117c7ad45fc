"""The tasks of a graph: functions of chunks, computed by the library of the chunks, in the process of a worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from ...backend import Place, dtype_name
from ...conversion import move, place_of
from ...kernels import Array, AttentionGrads, Problem, RowStatistics, StructuredMask, cast, choose, widen
from ...kernels._masks import shifted
from .. import _block as block
from .._block import Rows
from ._cells import Part

__all__ = ["finished", "forward_part", "gradients", "merged", "sinks_gradient", "total", "zeros_of"]

ARGUMENTS = ("mask", "bias", "q_segments", "k_segments", "seed", "table")


# ---- forward -------------------------------------------------------------------------------------------------------


def forward_part(part: Part, **arrays: Array) -> Rows:
    """Return the result over the keys of one chunk."""
    problem, arrays = native_problem(part, arrays)
    with problem.backend.scope():
        return block.forward(arrays["q"], arrays["k"], arrays["v"], problem)


def merged(parts: Sequence[Rows], part: Part) -> Rows:
    """Return the result over the keys of several parts."""
    problem, _ = native_problem(part, {"q": parts[0].out})
    with problem.backend.scope():
        return reduce(lambda a, b: block.joined(problem, a, b), parts)


def finished(parts: Sequence[Rows], part: Part, dtype: str, **arrays: Array) -> Rows:
    """Return the result over all keys and the sinks, in the dtype of the queries, which are there if no part is."""
    problem, arrays = native_problem(part, {"q": parts[0].out} | arrays if parts else arrays)
    with problem.backend.scope():
        if not parts or "sinks" in arrays:  # the sinks are a part without keys
            problem = replace(problem, sinks=arrays.get("sinks"))
            parts = [*parts, block.without_keys(arrays["q"], arrays["q"], problem)]
        out, statistics = merged(parts, part)
        return Rows(cast(problem.xp, out, problem.backend.dtype(dtype)), statistics)


# ---- backward ------------------------------------------------------------------------------------------------------


def gradients(part: Part, whole: bool, **arrays: Array) -> AttentionGrads:
    """Return what the pairs of one cell add to the gradients, given the result over all keys.

    ``whole``: the rows have no other keys, and no sinks.
    """
    problem, arrays = native_problem(part, arrays)
    dout, dlse, q, k, v, out = (arrays.get(name) for name in ("dout", "dlse", "q", "k", "v", "out"))
    statistics = RowStatistics(arrays["largest"], arrays["log_total"])
    with problem.backend.scope():
        if whole:
            return choose(problem.backend.kernels, problem).backward(dout, dlse, q, k, v, out, statistics, problem)
        return block.backward(dout, q, k, v, out, statistics, problem, dlse)


def sinks_gradient(part: Part, **arrays: Array) -> Array:
    """Return what some rows add to the gradient of the sinks, (H,) in at least float32."""
    problem, arrays = native_problem(part, {"q": arrays["dout"], **arrays})
    statistics = RowStatistics(arrays["largest"], arrays["log_total"])
    problem = replace(problem, sinks=widen(problem.xp, arrays["sinks"]))
    with problem.backend.scope():
        return block.sinks_gradient(arrays["dout"], arrays["out"], statistics, problem, arrays.get("dlse"))


def total(parts: Sequence[Array], dtype: str | None = None) -> Array:
    """Return the sum of gradients, in a dtype or in at least float32."""
    backend = place_of({"gradient": parts[0]}).backend
    xp = backend.namespace()
    result = reduce(xp.add, (widen(xp, x) for x in parts))
    return result if dtype is None else cast(xp, result, backend.dtype(dtype))


def zeros_of(x: Array) -> Array:
    """Return the gradient of a chunk that no query may attend to."""
    return place_of({"x": x}).backend.namespace().zeros_like(x)


# ---- the problem of a part -----------------------------------------------------------------------------------------


def native_problem(part: Part, arrays: dict[str, Array]) -> tuple[Problem, dict[str, Array]]:
    """Return the problem of a part for the library of its chunks, and its arrays, with 16-bit floats as float32.

    These are widened because results are summed over parts.
    """
    place = place_of(arrays)
    xp = place.backend.namespace()
    arrays = {name: widen(xp, x) if name in ("q", "k", "v", "dout", "out") else x for name, x in arrays.items()}
    q = arrays["q"]
    problem = replace(part.problem, backend=place.backend, device=place.device, dtype=dtype_name(q.dtype))
    own = {name: arrays[name] for name in ARGUMENTS if name in arrays}
    problem = replace(problem, **own, **_integers(part, arrays, problem, place))
    return (_with_place(part, problem) if problem.dropout else problem), arrays


def _integers(part: Part, arrays: dict[str, Array], problem: Problem, place: Place) -> dict[str, Any]:
    """Return offsets and lengths that are arrays, relative to the cell."""
    found: dict[str, Any] = {}
    xp: Any = problem.xp
    start_q, start_k = part.cell.queries.start, part.cell.keys.start
    if "q_offset" in arrays:
        found["q_offset"] = shifted(problem, arrays["q_offset"], plus=start_q, minus=start_k)
    if "key_lengths" in arrays:
        lengths = shifted(problem, arrays["key_lengths"], plus=0, minus=start_k)
        found["key_lengths"] = xp.where(xp.less(lengths, 0), xp.zeros_like(lengths), lengths)
    for name in ("q_offset", "key_lengths"):
        if isinstance(getattr(problem, name), np.ndarray):
            found[name] = move(getattr(problem, name), place, name=name)
    return found


def _with_place(part: Part, problem: Problem) -> Problem:
    """Return a part with its place in the whole problem, on which the bits of dropout depend."""
    xp, cell, sizes = problem.xp, part.cell, part.whole
    if isinstance(problem.mask, StructuredMask):  # relative to the cell, unlike the place
        problem = replace(problem, mask=problem.mask.pairs(problem))
    numbers = np.arange(math.prod(sizes.scores[:-2]), dtype=np.int32).reshape(sizes.scores[:-2])
    own = numbers[tuple(slice(*span) for span in (*cell.batch, cell.heads))].ravel()
    return replace(
        problem,
        origin=(cell.queries.start, cell.keys.start),
        rows=sizes.n_q,
        numbers=xp.asarray(own.tolist(), dtype=xp.int32, device=problem.native_device),
    )
