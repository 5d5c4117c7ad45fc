"""The tasks of a graph: functions of chunks, computed by the library of the chunks, in the process of a worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from ...backend import Backend, Place, dtype_name
from ...conversion import move, place_of
from ...functional._attention import empty_forward, kernel_for
from ...kernels import (
    Array,
    AttentionGrads,
    Problem,
    RowStatistics,
    StructuredMask,
    cast,
    expand,
    statistics_of_lse,
    wide,
    widen,
    with_statistics,
)
from ...kernels._masks import shifted
from ...kernels._merge import finished, merge_sums, sums_of
from ...kernels._part import part_backward
from ...kernels._plain import row_sum, without_empty
from ._cells import Part

__all__ = [
    "Rows", "empty_rows", "finished_rows", "forward_part", "gradients", "merged", "sinks_gradient", "total", "zeros_of",
]  # fmt: skip


ARGUMENTS = ("mask", "bias", "q_segments", "k_segments", "seed", "table")


class Rows(NamedTuple):
    """The result over some of the keys."""

    out: Array
    largest: Array
    log_total: Array

    @property
    def statistics(self) -> RowStatistics:
        """The statistics of each row."""
        return RowStatistics(self.largest, self.log_total)


# ---- forward -------------------------------------------------------------------------------------------------------


def forward_part(part: Part, **arrays: Array) -> Rows:
    """Return attention over the keys of one chunk."""
    problem, arrays = native_problem(part, arrays)
    q, k, v = (arrays[name] for name in "qkv")
    with problem.backend.scope():
        out, statistics = with_statistics(kernel_for(problem, None), q, k, v, problem)
    return Rows(out, *statistics)


def merged(parts: Sequence[Rows]) -> Rows:
    """Return the result over the keys of all parts."""
    if len(parts) == 1:
        return parts[0]
    backend = place_of({"out": parts[0].out}).backend
    xp = backend.namespace()
    with backend.scope():
        sums = (sums_of(xp, widen(xp, part.out), part.statistics) for part in parts)
        out, statistics = finished(xp, reduce(lambda a, b: merge_sums(xp, a, b), sums))
    return Rows(out, *statistics)


def finished_rows(parts: Sequence[Rows], dtype: str, sinks: Array | None = None) -> Rows:
    """Return the result over all keys and the sink, in the dtype of the queries."""
    out, rows = parts[0].out, tuple(parts[0].largest.shape)
    backend = place_of({"out": out}).backend
    xp = backend.namespace()
    if sinks is not None:
        own = statistics_of_lse(xp, expand(xp, cast(xp, sinks, parts[0].largest.dtype)[:, None], rows))
        parts = [*parts, Rows(xp.zeros_like(out), *own)]
    whole = merged(parts)
    return whole._replace(out=cast(xp, whole.out, backend.dtype(dtype)))


def empty_rows(part: Part, **arrays: Array) -> Rows:
    """Return the result of rows that may attend to no key."""
    problem, arrays = native_problem(part, arrays)
    problem = replace(problem, sinks=arrays.get("sinks"))
    out, statistics = empty_forward(arrays["q"], arrays["q"], arrays["q"], problem)
    return Rows(out, *statistics)


# ---- backward ------------------------------------------------------------------------------------------------------


def gradients(part: Part, joined: bool, **arrays: Array) -> AttentionGrads:
    """Return what the pairs of one cell add to the gradients, given the result over all keys.

    ``joined``: the statistics of the rows are over more than the keys of this cell.
    """
    problem, arrays = native_problem(part, arrays, widened=joined)
    q, k, v, dout, out = (arrays[name] for name in ("q", "k", "v", "dout", "out"))
    statistics = RowStatistics(arrays["largest"], arrays["log_total"])
    given = (dout, arrays.get("dlse"), q, k, v, out, statistics, problem)
    kernel = kernel_for(problem, None)
    with problem.backend.scope():
        return part_backward(kernel, *given) if joined else kernel.backward(*given)


def sinks_gradient(
    sinks: Array, dout: Array, out: Array, largest: Array, log_total: Array, dlse: Array | None = None
) -> Array:  # fmt: skip
    """Return what some rows add to the gradient of the sinks, (H,)."""
    backend = place_of({"sinks": sinks, "dout": dout}).backend
    xp = backend.namespace()
    dtype = wide(xp, out.dtype)
    with backend.scope():
        shift = -row_sum(xp, widen(xp, dout), widen(xp, out))
        shift = shift if dlse is None else shift + cast(xp, dlse, dtype)
        above = cast(xp, sinks, dtype)[:, None] - largest
        dsinks = xp.exp(above - without_empty(xp, log_total)) * shift  # (…, H, n_q)
        return xp.sum(dsinks, axis=tuple(i for i in range(dsinks.ndim) if i != dsinks.ndim - 2))


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


def native_problem(
    part: Part, arrays: dict[str, Array], widened: bool = True
) -> tuple[Problem, dict[str, Array]]:  # fmt: skip
    """Return the problem of a part for the library of its chunks, and its arrays.

    Arrays of 16-bit floats are ``widened`` to float32 where results are summed over several parts.
    """
    place = place_of(arrays)
    xp = place.backend.namespace()
    if widened:
        floats = ("q", "k", "v", "dout", "out")
        arrays = {name: widen(xp, x) if name in floats else x for name, x in arrays.items()}
    q = arrays["q"]
    problem = replace(part.problem, backend=place.backend, device=place.device, dtype=dtype_name(q.dtype))
    own = {
        name: arrays[name] for name in ("mask", "bias", "q_segments", "k_segments", "seed", "table") if name in arrays
    }
    problem = replace(problem, **own, **_integers(part, arrays, problem, place))
    return (_with_place(part, problem) if problem.dropout else problem), arrays


def _integers(part: Part, arrays: dict[str, Array], problem: Problem, place: Place) -> dict[str, Any]:
    """Return offsets and lengths that are arrays, relative to the cell."""
    found: dict[str, Any] = {}
    start_q, start_k = part.cell.queries.start, part.cell.keys.start
    if "q_offset" in arrays:
        found["q_offset"] = shifted(problem, arrays["q_offset"], plus=start_q, minus=start_k)
    if "key_lengths" in arrays:
        found["key_lengths"] = _not_negative(
            place.backend, shifted(problem, arrays["key_lengths"], plus=0, minus=start_k)
        )
    for name in ("q_offset", "key_lengths"):
        if isinstance(getattr(problem, name), np.ndarray):
            found[name] = move(getattr(problem, name), place, name=name)
    return found


def _not_negative(backend: Backend, x: Any) -> Array:
    xp = backend.namespace()
    return xp.where(xp.less(x, 0), xp.zeros_like(x), x)


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
