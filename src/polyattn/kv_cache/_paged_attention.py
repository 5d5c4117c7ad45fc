"""Attention over a pool of pages as it lies: each page with the queries of its owner, the results joined.

The pages are the batch of one problem, so nothing of the pool is gathered or copied; what is gathered is a query
for each page, little beside the page. A page's log-sum-exp tells what its result counts for, which is exact:
Rabe and Staats (2021); Kwon et al., "Efficient memory management for large language model serving with
PagedAttention" (2023). Many queries would be much for each page: then some pages are read at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ..backend import Array, Backend, Place
from ..functional._arguments import Settings, make_problem
from ..functional._attention import backward as attention_backward
from ..functional._attention import prepare as prepare_attention
from ..functional._operation import Operation
from ..kernels import GENERIC, AttentionGrads, Problem, RowStatistics, cast, named, wide, widen
from ..kernels._exclusion import matmul_excluding
from ..kernels._merge import Sums, finished, merge_sums, sums_of
from ..kernels._plain import Rows, in_dtypes, nonzero
from ..kernels._tiled import tiled_gradients, tiled_rows, tiled_sums, with_statistics
from ..kernels._units import (
    Units,
    divided,
    fits,
    gradient_unit,
    is_moderate,
    multiplied,
    row_units,
    value_unit,
)

__all__ = ["ARRAYS", "operation"]

ARRAYS = (
    "q", "k", "v", "bias", "sinks", "mask", "q_segments", "k_segments", "owners", "numbers", "counts",
)  # fmt: skip
"""The order in which the native functions take their arrays; the first five have gradients."""
PAGED = ("k", "v", "bias", "mask", "q_segments", "k_segments", "owners", "numbers")
"""Those that have a page for their first axis; a structured bias's table has none."""


class Group(NamedTuple):
    """The problem of some pages, as attention's native functions take it."""

    arrays: tuple[Array | None, ...]
    owners: Array  # (G,), −1 for a page that counts for nothing
    entries: Array  # (G,), 0 for these
    backend: Backend

    @property
    def qkv(self) -> tuple[Array, Array, Array]:
        """The queries, keys and values."""
        q, k, v, *_ = self.arrays
        return q, k, v

    def rows_of(self, units: Units) -> Units:
        """Return the units of the rows of each page's owner."""
        xp = self.backend.namespace()
        return Units(*(xp.take(x, self.entries, axis=0) for x in units))


class Reading(NamedTuple):
    """The arrays of a call, and how many pages are read at a time."""

    backend: Backend
    arrays: dict[str, Array | None]
    settings: Settings
    pages: int

    @property
    def groups(self) -> int:
        """How many groups there are; the last begins before its turn where the number of pages asks for it."""
        return -(-self._total // self.pages)

    @property
    def _total(self) -> int:
        return int(self.arrays["k"].shape[0])  # type: ignore[union-attr]  # there are keys

    def start(self, i: Any) -> Any:
        """Return the first page of a group."""
        if isinstance(i, int):
            return min(i * self.pages, self._total - self.pages)
        return self.backend.namespace().clip(i * self.pages, None, self._total - self.pages)

    def part(self, x: Array, i: Any) -> Array:
        """Return the pages of a group: a view where that can be."""
        if self.groups == 1:
            return x
        start = self.start(i)
        if isinstance(start, int):
            return x[start : start + self.pages, ...]
        return self.backend.namespace().take(x, start + self._count(), axis=0)

    def group(self, i: Any) -> Group:
        """Return the problem of a group."""
        xp, given = self.backend.namespace(), self.arrays
        paged = [name for name in PAGED if given[name] is not None and not (name == "bias" and self.settings.bias)]
        x: dict[str, Any] = given | {name: self.part(given[name], i) for name in paged}
        owners, size, n_q = x["owners"], self.settings.sizes.n_k, self.settings.sizes.n_q
        if self.groups > 1:  # a page that the group before had too counts once
            owners = xp.where(self.start(i) + self._count() >= i * self.pages, owners, xp.full_like(owners, -1))
        entries = xp.clip(owners, 0, None)
        start = x["numbers"] * size  # (G,): the position of a page's first key
        lengths = xp.take(x["counts"], entries, axis=0)
        held = xp.where(owners >= 0, xp.clip(lengths - start, 0, size), xp.zeros_like(start))
        q = xp.take(x["q"], entries, axis=0)  # (G, H, n_q, d_k)
        offset = lengths - n_q - start
        arrays = (q, x["k"], x["v"], x["bias"], None, x["mask"], offset, held, x["q_segments"], x["k_segments"], None)
        return Group(arrays, owners, entries, self.backend)

    def problem(self, group: Group) -> Problem:
        """Return the problem of a group."""
        return make_problem(Place(self.backend, self.settings.device), group.arrays, self.settings)

    @property
    def whole(self) -> Problem:
        """The problem of a page, but for its keys: those of all pages."""
        x = self.arrays
        seen = (x["q"], x["k"], x["v"], x["bias"], None, None, None, None, None, None, None)
        problem = make_problem(Place(self.backend, self.settings.device), seen, self.settings)
        return replace(problem, sizes=problem.sizes._replace(n_k=problem.sizes.n_k * self._total))

    def _count(self) -> Array:
        xp = self.backend.namespace()
        return xp.arange(self.pages, dtype=xp.int32, device=self.backend.native_device(self.settings.device))


def prepare(place: Place, arrays: tuple[Any, ...], static: dict[str, Any]) -> dict[str, Any]:
    """Choose the kernel that reads the pages."""
    x = dict(zip(ARRAYS, arrays, strict=True))
    seen = (
        x["q"], x["k"], x["v"], x["bias"], None, x["mask"], x["numbers"], x["numbers"],
        x["q_segments"], x["k_segments"], None,
    )  # fmt: skip
    return static | prepare_attention(place, seen, static)


def forward(backend: Backend, *arrays: Array, settings: Settings, pages: int) -> tuple[Array, tuple[Any, ...]]:
    """Return out (B, H, n_q, d_v); save the arrays, out and the row statistics."""
    out, statistics = _compiled(backend, settings, pages)(*arrays)
    return out, (*arrays, out, *statistics)


@functools.lru_cache(maxsize=256)
def _compiled(backend: Backend, settings: Settings, pages: int) -> Callable[..., tuple[Array, RowStatistics]]:
    """Return the forward as one program, where the library compiles any."""
    return backend.jit(functools.partial(_forward, backend, settings, pages))


def _forward(backend: Backend, settings: Settings, pages: int, *arrays: Array) -> tuple[Array, RowStatistics]:
    """Return out (B, H, n_q, d_v) and the row statistics (B, H, n_q)."""
    x = dict(zip(ARRAYS, arrays, strict=True))
    xp, reading = backend.namespace(), Reading(backend, x, settings, pages)
    q, k, v = (widen(xp, x[name]) for name in ("q", "k", "v"))
    problem = reading.whole

    def ordinary() -> tuple[Array, RowStatistics]:
        def of_pages(group: Group) -> Sums:
            part, kernel = reading.problem(group), named(backend.kernels, settings.kernel or GENERIC.name)
            out, statistics = with_statistics(kernel, *group.qkv, part)
            return sums_of(xp, widen(xp, out), statistics)

        out, statistics = finished(xp, over_groups(reading, of_pages, settings.sizes.d_v, None))
        return cast(xp, out, x["q"].dtype), statistics

    def careful() -> tuple[Array, RowStatistics]:
        units, unit = row_units(q, k, problem), value_unit(v, problem)

        def of_pages(group: Group) -> Sums:
            q_t, k_t, v_t = group.qkv
            v_t = divided(widen(xp, v_t), unit)
            return tiled_sums(q_t, k_t, v_t, reading.problem(group), group.rows_of(units))

        out, statistics = finished(xp, over_groups(reading, of_pages, settings.sizes.d_v, units), units)
        return cast(xp, multiplied(out, unit), x["q"].dtype), statistics

    return backend.cond(fits(q, k, v, problem), ordinary, careful)  # type: ignore[no-any-return]


def over_groups(reading: Reading, of_pages: Callable[[Group], Sums], features: int, units: Units | None) -> Sums:
    """Return the sums of every row over its pages and the sink, from those of the pages of each group."""
    backend, x = reading.backend, reading.arrays
    xp, q = backend.namespace(), x["q"]
    rows, dtype = tuple(q.shape[:-1]), wide(xp, q.dtype)  # type: ignore[union-attr]  # there are queries
    device = backend.native_device(reading.settings.device)

    def one(i: Any) -> Sums:
        group = reading.group(i)
        return joined(backend, group, of_pages(group), rows[0], units)

    zero = xp.zeros((*rows, 1), dtype=dtype, device=device)
    nothing = Sums(xp.zeros((*rows, features), dtype=dtype, device=device), zero, xp.zeros_like(zero))
    if reading.groups == 1:
        total = one(0)
    else:
        total, _ = backend.scan(lambda carry, i: (merge_sums(xp, carry, one(i), units), ()), nothing, reading.groups)
    if x["sinks"] is not None:  # one more key, whose value is zero
        sinks = zero + divided(cast(xp, x["sinks"], dtype)[:, None, None], units)
        one_ = xp.where(xp.equal(sinks, -math.inf), zero, xp.ones_like(zero))
        total = merge_sums(xp, total, Sums(nothing.out, one_, sinks), units)
    return total


def joined(backend: Backend, group: Group, pages: Sums, batch: int, units: Units | None) -> Sums:
    """Return the sums (B, H, n_q, ·) of each entry over its pages of a group, from those of the pages."""
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
    # What one entry's pages hold, NaN included, must not reach another: the product leaves out what is not its own.
    product = matmul_excluding(
        backend, xp.permute_dims(scales[..., 0], (2, 3, 0, 1)), xp.permute_dims(pages.out, (1, 2, 0, 3)), mine
    )  # (H, n_q, B, d)
    return Sums(xp.permute_dims(product, (2, 0, 1, 3)), totals, base)


def backward(
    backend: Backend, dout: Array, saved: tuple[Any, ...], *, settings: Settings, pages: int
) -> tuple[Any, ...]:
    """Return a gradient for each array: each page's from what its rows are over all their keys."""
    *arrays, out, largest, log_total = saved
    x = dict(zip(ARRAYS, arrays, strict=True))
    xp, reading = backend.namespace(), Reading(backend, x, settings, pages)
    q, k, v, dout_ = (widen(xp, y) for y in (x["q"], x["k"], x["v"], dout))
    problem = replace(reading.whole, sinks=x["sinks"])

    def ordinary() -> AttentionGrads:
        def of_pages(group: Group) -> Any:
            rows = (xp.take(y, group.entries, axis=0) for y in (dout, out, largest, log_total))
            dout_t, *own = rows
            return attention_backward(backend, dout_t, (*group.arrays, *own), settings=settings)[:4]

        rows = Rows(largest, log_total, -xp.sum(dout_ * widen(xp, out), axis=-1))
        grads = summed_over_groups(reading, of_pages)
        return in_dtypes(problem, x["q"], x["k"], x["v"], grads, rows)

    def careful() -> AttentionGrads:
        units, unit = row_units(q, k, problem), gradient_unit(dout_, v, problem)
        small = divided(dout_, unit)

        def rows_of_pages(group: Group) -> Sums:
            dout_t, part = xp.take(small, group.entries, axis=0), reading.problem(group)
            return tiled_rows(dout_t, *group.qkv, part, group.rows_of(units))

        row = over_groups(reading, rows_of_pages, 1, units)
        means = row.out / nonzero(xp, row.total)
        of_row = (xp.squeeze(y, axis=-1) for y in (row.largest, xp.log(row.total), -means))
        largest_, log_total_, shift = of_row
        rows = Rows(largest_, log_total_, shift, units)

        def of_pages(group: Group) -> Any:
            dout_t, *own_t = (xp.take(y, group.entries, axis=0) for y in (small, *rows[:3]))
            rows_t = Rows(own_t[0], own_t[1], own_t[2], group.rows_of(units))
            return tiled_gradients(dout_t, *group.qkv, rows_t, reading.problem(group))

        grads = summed_over_groups(reading, of_pages)
        return in_dtypes(problem, x["q"], x["k"], x["v"], grads, rows, unit)

    moderate = is_moderate(q, k, v, RowStatistics(largest, log_total), problem, dout_)
    grads = backend.cond(moderate, ordinary, careful)
    return *grads, *(None for _ in ARRAYS[5:])


def summed_over_groups(reading: Reading, of_pages: Callable[[Group], Any]) -> tuple[Array | None, ...]:
    """Return the gradients of q, k, v and the bias from those of each group's pages."""
    backend, x = reading.backend, reading.arrays
    xp, put, table = backend.namespace(), reading.backend.update_slice, reading.settings.bias is not None

    def one(carry: Any, i: Any) -> tuple[Any, tuple[()]]:
        group, (dq, *totals) = reading.group(i), carry
        dq_, *parts = of_pages(group)
        dq = backend.index_add(dq, group.entries, widen(xp, dq_))
        for number, (name, total, part) in enumerate(zip(("k", "v", "bias"), totals, parts, strict=True)):
            if part is None:
                continue
            part = widen(xp, part)
            if name == "bias" and table:
                totals[number] = total + part
            else:  # pages that two groups have are zero in one of them
                totals[number] = put(total, reading.part(total, i) + part, reading.start(i), 0)
        return (dq, *totals), ()

    given = (x[name] for name in ("q", "k", "v", "bias"))
    zeros = tuple(None if y is None else xp.zeros_like(y, dtype=wide(xp, y.dtype)) for y in given)
    totals, _ = backend.scan(one, zeros, reading.groups)
    return tuple(totals)


operation = Operation("PagedKVCache.attention", forward, backward, prepare)
