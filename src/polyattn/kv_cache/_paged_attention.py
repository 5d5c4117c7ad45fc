"""Attention over a pool of pages in place: the queries of a page's owner attend to the page, and results are merged.

The pages are the batch axis of one problem, so that the pool is neither gathered nor copied. Only the queries are
gathered, once for each page, and they are small beside the page. The row statistics of each page give the exact
weight of its result in the merge: Rabe and Staats (2021); Kwon et al., "Efficient memory management for large language
model serving with PagedAttention" (2023). With many queries, the pages are processed in groups to limit memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from ..backend import Array, Backend, Record, Structure, flatten
from ..functional._arguments import make_problem
from ..functional._dispatch import Operation
from ..kernels import AttentionGrads, Kernel, Problem, RowStatistics, cast, choose, wide, widen
from ..kernels._exclusion import matmul_excluding
from ..kernels._merge import Sums, finished, merge_sums, sums_of
from ..kernels._plain import Rows, in_dtypes, nonzero
from ..kernels._tiled import tiled_gradients, tiled_rows, tiled_sums, with_statistics
from ..kernels._units import (
    Units,
    divided,
    gradient_unit,
    is_moderate,
    multiplied,
    row_units,
    value_unit,
)

__all__ = ["OPERATION"]

PAGED = ("k", "v", "bias", "mask", "q_segments", "k_segments", "owners", "numbers")
"""The arrays with pages as their first axis; the table of a structured bias is not one of them."""
FEW = 2


class Group(NamedTuple):
    """The attention problem of a group of pages."""

    q: Array
    k: Array
    v: Array
    problem: Problem
    owners: Array  # (G,), −1 for a page to ignore
    entries: Array  # (G,), the owner, or 0 for a page to ignore

    def rows_of(self, units: Units) -> Units:
        """Return, for each page, the units of the rows of its owner."""
        xp = self.problem.xp
        return Units(*(xp.take(x, self.entries, axis=0) for x in units))


@dataclass(frozen=True, eq=False)
class Reading(Record):
    """The arrays of a call, its static arguments, and the number of pages in a group."""

    backend: Backend
    arrays: dict[str, Array]
    options: dict[str, Any]
    pages: int

    ARRAYS: ClassVar[tuple[str, ...]] = ("arrays", "options")

    @property
    def groups(self) -> int:
        """The number of groups. The last group overlaps the one before it if the pages do not divide evenly."""
        return -(-self._total // self.pages)

    @property
    def few(self) -> Reading:
        """The same with small groups, for a branch that copies pages; a compiler reserves its memory even if unused."""
        pages = min(self.pages, FEW)
        sizes = self.options["sizes"]._replace(batch=(pages,))
        return replace(self, pages=pages, options=self.options | {"sizes": sizes})

    @property
    def device(self) -> str | None:
        """The device of the arrays."""
        return self.backend.device_of(self.arrays["q"])

    @property
    def _total(self) -> int:
        return int(self.arrays["k"].shape[0])

    def start(self, i: Any) -> Any:
        """Return the first page of a group."""
        if isinstance(i, int):
            return min(i * self.pages, self._total - self.pages)
        return self.backend.namespace().clip(i * self.pages, None, self._total - self.pages)

    def part(self, x: Array, i: Any) -> Array:
        """Return the pages of a group, as a view if possible."""
        if self.groups == 1:
            return x
        start = self.start(i)
        if isinstance(start, int):
            return x[start : start + self.pages, ...]
        return self.backend.namespace().take(x, start + self._count(), axis=0)

    def group(self, i: Any) -> Group:
        """Return the problem of a group."""
        xp, structured = self.backend.namespace(), "bias_structure" in self.options
        paged = [name for name in PAGED if name in self.arrays and not (name == "bias" and structured)]
        x = self.arrays | {name: self.part(self.arrays[name], i) for name in paged}
        owners, size, n_q = x.pop("owners"), self.options["sizes"].n_k, self.options["sizes"].n_q
        if self.groups > 1:  # ignore pages that are also in the group before
            owners = xp.where(self.start(i) + self._count() >= i * self.pages, owners, xp.full_like(owners, -1))
        entries = xp.clip(owners, 0, None)
        start = x.pop("numbers") * size  # (G,): the position of a page's first key
        lengths = xp.take(x.pop("counts"), entries, axis=0)
        x["key_lengths"] = xp.where(owners >= 0, xp.clip(lengths - start, 0, size), xp.zeros_like(start))
        x["q_offset"] = lengths - n_q - start
        q, k, v = xp.take(x.pop("q"), entries, axis=0), x.pop("k"), x.pop("v")  # q (G, H, n_q, d_k)
        x.pop("sinks", None)  # sinks belong to entries, not to pages
        problem = make_problem(self.backend, q, self.device, **x, **self._problem_options)
        return Group(q, k, v, problem, owners, entries)

    def kernel_for(self, problem: Problem) -> Kernel:
        """Return the kernel that computes the pages of a group."""
        return choose(self.backend.kernels, problem, self.options["kernel"])

    @property
    def whole(self) -> Problem:
        """The problem of the entries over the keys of all pages, without the arguments that exclude keys."""
        given, options = {name: self.arrays.get(name) for name in ("bias", "sinks")}, self._problem_options
        sizes = options["sizes"]._replace(n_k=options["sizes"].n_k * self._total)
        return make_problem(self.backend, self.arrays["q"], self.device, **given, **(options | {"sizes": sizes}))

    @property
    def _problem_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name != "kernel"}

    def _count(self) -> Array:
        xp = self.backend.namespace()
        return xp.arange(self.pages, dtype=xp.int32, device=self.backend.native_device(self.device))


class Saved(NamedTuple):
    """The arrays and static values that the backward needs."""

    reading: Reading
    out: Array
    statistics: RowStatistics


def forward(backend: Backend, *, pages: int, options: dict[str, Any], **arrays: Array) -> tuple[Array, Saved]:
    """Return out (B, H, n_q, d_v)."""
    reading = Reading(backend, arrays, options, pages)
    flat, structure = flatten(reading)
    out, statistics = _compiled(backend, structure)(*flat)
    return out, Saved(reading, out, statistics)


@functools.lru_cache(maxsize=256)
def _compiled(backend: Backend, structure: Structure) -> Callable[..., tuple[Array, RowStatistics]]:
    """Return the forward as one compiled program, if the library has a compiler."""
    return backend.jit(lambda *arrays: _read(structure.build(arrays)))


def _read(reading: Reading) -> tuple[Array, RowStatistics]:
    """Return out (B, H, n_q, d_v) and the row statistics (B, H, n_q)."""
    backend, x, problem = reading.backend, reading.arrays, reading.whole
    xp, d_v = problem.xp, problem.sizes.d_v

    def of_pages_by_a_kernel(group: Group) -> Sums:
        kernel = reading.kernel_for(group.problem)
        out, statistics = with_statistics(kernel, group.q, group.k, group.v, group.problem)
        return sums_of(xp, widen(xp, out), statistics)

    sums, statistics = finished(xp, over_groups(reading, of_pages_by_a_kernel, d_v, None))
    out = cast(xp, sums, x["q"].dtype)

    def careful() -> tuple[Array, RowStatistics]:
        q, k, v = (widen(xp, x[name]) for name in ("q", "k", "v"))
        units, unit = row_units(q, k, problem), value_unit(v, problem)
        few = reading.few

        def of_pages(group: Group) -> Sums:
            v_t = divided(widen(xp, group.v), unit)
            return tiled_sums(group.q, group.k, v_t, group.problem, group.rows_of(units))

        out, statistics = finished(xp, over_groups(few, of_pages, d_v, units), units)
        return cast(xp, multiplied(out, unit), x["q"].dtype), statistics

    # A kernel's results are right if they can be represented. To check them needs no pass over the pages.
    right = xp.logical_and(xp.all(xp.isfinite(sums)), xp.all(xp.isfinite(statistics.largest)))
    return backend.cond(right, lambda: (out, statistics), careful)


def over_groups(reading: Reading, of_pages: Callable[[Group], Sums], features: int, units: Units | None) -> Sums:
    """Return the sums of each row over its pages and the sink; ``of_pages`` computes those of the pages of a group."""
    backend, x = reading.backend, reading.arrays
    xp, q = backend.namespace(), x["q"]
    rows, dtype, device = tuple(q.shape[:-1]), wide(xp, q.dtype), backend.native_device(reading.device)

    def one(i: Any) -> Sums:
        group = reading.group(i)
        return joined(backend, group, of_pages(group), rows[0], units)

    zero = xp.zeros((*rows, 1), dtype=dtype, device=device)
    nothing = Sums(xp.zeros((*rows, features), dtype=dtype, device=device), zero, xp.zeros_like(zero))
    if reading.groups == 1:
        total = one(0)
    else:
        total, _ = backend.scan(lambda carry, i: (merge_sums(xp, carry, one(i), units), ()), nothing, reading.groups)
    if "sinks" in x:  # one more key, with a value of zero
        sinks = zero + divided(cast(xp, x["sinks"], dtype)[:, None, None], units)
        one_ = xp.where(xp.equal(sinks, -math.inf), zero, xp.ones_like(zero))
        total = merge_sums(xp, total, Sums(nothing.out, one_, sinks), units)
    return total


def joined(backend: Backend, group: Group, pages: Sums, batch: int, units: Units | None) -> Sums:
    """Return the sums (B, H, n_q, ·) of each entry over its pages in a group, from those of the pages."""
    xp, owners = backend.namespace(), group.owners
    entries = xp.arange(batch, dtype=owners.dtype, device=backend.native_device(backend.device_of(owners)))
    mine = owners[None, :] == entries[:, None]  # (B, G)
    of = mine[:, :, None, None, None]
    largest, total = pages.largest[None, ...], pages.total[None, ...]  # (1, G, H, n_q, 1)
    counts = xp.logical_and(of, xp.not_equal(total, 0))
    top = xp.max(xp.where(counts, largest, xp.full_like(largest, -math.inf)), axis=1)  # (B, H, n_q, 1)
    base = xp.where(xp.equal(top, -math.inf), xp.zeros_like(top), top)
    above = largest - base[:, None, ...]
    if units is not None:
        above = multiplied(above, Units(*(x[:, None, ...] for x in units)))
    scales = xp.where(counts, xp.exp(above), xp.zeros_like(above))  # (B, G, H, n_q, 1)
    totals = xp.sum(xp.where(counts, scales * total, xp.zeros_like(scales)), axis=1)
    below = xp.logical_and(xp.any(counts, axis=1), xp.equal(top, -math.inf))  # all scores below the range
    totals = xp.where(below, xp.full_like(totals, math.nan), totals)
    # The product excludes pages of other entries: their values, NaN included, must not affect an entry.
    product = matmul_excluding(
        backend, xp.permute_dims(scales[..., 0], (2, 3, 0, 1)), xp.permute_dims(pages.out, (1, 2, 0, 3)), mine
    )  # (H, n_q, B, d)
    return Sums(xp.permute_dims(product, (2, 0, 1, 3)), totals, base)


def backward(backend: Backend, dout: Array, saved: Saved) -> AttentionGrads:
    """Return the gradients, those of each page computed with the statistics of rows over all keys."""
    reading, out, statistics = saved
    xp, x, problem = backend.namespace(), reading.arrays, reading.whole
    q, k, v, dout_ = (widen(xp, y) for y in (x["q"], x["k"], x["v"], dout))

    def ordinary() -> AttentionGrads:
        def of_pages(group: Group) -> Any:
            dout_t, out_t, *own = (xp.take(y, group.entries, axis=0) for y in (dout, out, *statistics))
            kernel, own_t = reading.kernel_for(group.problem), RowStatistics(*own)
            return kernel.backward(dout_t, None, group.q, group.k, group.v, out_t, own_t, group.problem)[:4]

        rows = Rows(*statistics, -xp.sum(dout_ * widen(xp, out), axis=-1))
        grads = summed_over_groups(reading, of_pages)
        return in_dtypes(problem, x["q"], x["k"], x["v"], grads, rows)

    def careful() -> AttentionGrads:
        units, unit = row_units(q, k, problem), gradient_unit(dout_, v, problem)
        small, few = divided(dout_, unit), reading.few

        def rows_of_pages(group: Group) -> Sums:
            dout_t = xp.take(small, group.entries, axis=0)
            return tiled_rows(dout_t, group.q, group.k, group.v, group.problem, group.rows_of(units))

        row = over_groups(few, rows_of_pages, 1, units)
        means = row.out / nonzero(xp, row.total)
        largest, log_total, shift = (xp.squeeze(y, axis=-1) for y in (row.largest, xp.log(row.total), -means))
        rows = Rows(largest, log_total, shift, units)

        def of_pages(group: Group) -> Any:
            dout_t, *own = (xp.take(y, group.entries, axis=0) for y in (small, largest, log_total, shift))
            rows_t = Rows(own[0], own[1], own[2], group.rows_of(units))
            return tiled_gradients(dout_t, group.q, group.k, group.v, rows_t, group.problem)

        grads = summed_over_groups(few, of_pages)
        return in_dtypes(problem, x["q"], x["k"], x["v"], grads, rows, unit)

    moderate = is_moderate(q, k, v, statistics, problem, dout_)
    return backend.cond(moderate, ordinary, careful)


def summed_over_groups(reading: Reading, of_pages: Callable[[Group], Any]) -> tuple[Array | None, ...]:
    """Return the gradients of q, k, v and the bias; ``of_pages`` computes those of the pages of a group."""
    backend, x = reading.backend, reading.arrays
    xp, put, structured = backend.namespace(), backend.update_slice, "bias_structure" in reading.options

    def one(carry: Any, i: Any) -> tuple[Any, tuple[()]]:
        group, (dq, dk, dv, dbias) = reading.group(i), carry
        parts = of_pages(group)
        dq_, dk_, dv_, dbias_ = (None if dx is None else widen(xp, dx) for dx in parts)

        def add(total: Array, part: Array) -> Array:  # a page in two groups has a zero gradient in one
            return put(total, reading.part(total, i) + part, reading.start(i), 0)

        dq, dk, dv = backend.index_add(dq, group.entries, dq_), add(dk, dk_), add(dv, dv_)
        if dbias is not None:
            dbias = dbias + dbias_ if structured else add(dbias, dbias_)
        return (dq, dk, dv, dbias), ()

    given = (x.get(name) for name in ("q", "k", "v", "bias"))
    zeros = tuple(None if y is None else xp.zeros_like(y, dtype=wide(xp, y.dtype)) for y in given)
    totals, _ = backend.scan(one, zeros, reading.groups)
    return tuple(totals)


OPERATION = Operation("PagedKVCache.attention", forward, backward)
