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
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..backend import Array, Backend, Record, Structure, flatten
from ..functional import AttentionGrads, _attention
from ..functional._arguments import make_problem
from ..functional._dispatch import Operation
from ..kernels import Problem, cast, merge, wide, widen
from ..kernels._exclusion import matmul_excluding

__all__ = ["OPERATION"]

PAGED = ("k", "v", "bias", "mask", "q_segments", "k_segments", "owners", "numbers")
"""The arrays that have a page for their first axis; a structured bias's table has none."""


class Group(NamedTuple):
    """The attention problem of some pages."""

    q: Array
    k: Array
    v: Array
    problem: Problem
    owners: Array  # (G,), −1 for a page that counts for nothing
    entries: Array  # (G,), 0 for these


@dataclass(frozen=True, eq=False)
class Reading(Record):
    """The arrays of a call, its static arguments, and how many pages are read at a time."""

    backend: Backend
    arrays: dict[str, Array]
    options: dict[str, Any]
    pages: int

    ARRAYS: ClassVar[tuple[str, ...]] = ("arrays", "options")

    @property
    def groups(self) -> int:
        """How many groups there are; the last overlaps the one before where the number of pages asks for it."""
        return -(-self._total // self.pages)

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
        """Return the pages of a group: a view where that can be."""
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
        if self.groups > 1:  # a page that the group before had too counts once
            owners = xp.where(self.start(i) + self._count() >= i * self.pages, owners, xp.full_like(owners, -1))
        entries = xp.clip(owners, 0, None)
        start = x.pop("numbers") * size  # (G,): the position of a page's first key
        lengths = xp.take(x.pop("counts"), entries, axis=0)
        x["key_lengths"] = xp.where(owners >= 0, xp.clip(lengths - start, 0, size), xp.zeros_like(start))
        x["q_offset"] = lengths - n_q - start
        q, k, v = xp.take(x.pop("q"), entries, axis=0), x.pop("k"), x.pop("v")  # q (G, H, n_q, d_k)
        x.pop("sinks", None)  # of each entry, not of each page
        options = {name: value for name, value in self.options.items() if name != "kernel"}
        return Group(q, k, v, make_problem(self.backend, q, self.device, **x, **options), owners, entries)

    def _count(self) -> Array:
        xp = self.backend.namespace()
        return xp.arange(self.pages, dtype=xp.int32, device=self.backend.native_device(self.device))


class Saved(NamedTuple):
    """What the backward needs."""

    reading: Reading
    out: Array
    lse: Array


def forward(backend: Backend, *, pages: int, options: dict[str, Any], **arrays: Array) -> tuple[Array, Saved]:
    """Return out (B, H, n_q, d_v)."""
    reading = Reading(backend, arrays, options, pages)
    flat, structure = flatten(reading)
    out, lse = _compiled(backend, structure)(*flat)
    return out, Saved(reading, out, lse)


@functools.lru_cache(maxsize=256)
def _compiled(backend: Backend, structure: Structure) -> Callable[..., tuple[Array, Array]]:
    """Return the forward as one program, where the library compiles any."""
    return backend.jit(lambda *arrays: _read(structure.build(arrays)))


def _read(reading: Reading) -> tuple[Array, Array]:
    """Return out (B, H, n_q, d_v) and lse (B, H, n_q)."""
    backend, x, kernel = reading.backend, reading.arrays, reading.options["kernel"]
    xp, q, d_v = backend.namespace(), x["q"], reading.options["sizes"].d_v
    rows, device = tuple(q.shape[:-1]), backend.native_device(reading.device)

    def one(i: Any) -> tuple[Array, Array]:
        group = reading.group(i)
        out, lse = _attention.kernel_for(group.problem, kernel).forward(group.q, group.k, group.v, group.problem)
        return joined(backend, group.owners, widen(xp, out), lse, rows[0])

    if reading.groups == 1:
        out, lse = one(0)
    else:
        dtype = wide(xp, q.dtype)
        nothing = (
            xp.zeros((*rows, d_v), dtype=dtype, device=device), xp.full(rows, -math.inf, dtype=dtype, device=device)
        )  # fmt: skip
        (out, lse), _ = backend.scan(lambda carry, i: (merge(xp, carry, one(i)), ()), nothing, reading.groups)
    if "sinks" in x:  # one more key, whose value is zero
        sinks = cast(xp, x["sinks"], lse.dtype)[:, None]
        out, lse = merge(xp, (out, lse), (xp.zeros_like(out), sinks))
    return cast(xp, out, q.dtype), lse


def joined(backend: Backend, owners: Array, out: Array, lse: Array, batch: int) -> tuple[Array, Array]:
    """Return out (B, H, n_q, d_v) and lse (B, H, n_q) of each entry over its pages, from those of the pages (G, …)."""
    xp = backend.namespace()
    entries = xp.arange(batch, dtype=owners.dtype, device=backend.native_device(backend.device_of(owners)))
    mine = owners[None, :] == entries[:, None]  # (B, G)
    of, lse = mine[:, :, None, None], lse[None, ...]  # (B, G, 1, 1), (1, G, H, n_q)
    none = xp.full_like(lse, -math.inf)
    largest = xp.max(xp.where(of, lse, none), axis=1)  # (B, H, n_q)
    empty = largest == -math.inf
    base = xp.where(empty, xp.zeros_like(largest), largest)
    weights = xp.where(of, xp.exp(lse - base[:, None, ...]), xp.zeros_like(lse))  # (B, G, H, n_q)
    total = xp.sum(weights, axis=1)
    # What one entry's pages hold, NaN included, must not reach another: the product leaves out what is not its own.
    product = matmul_excluding(
        backend, xp.permute_dims(weights, (2, 3, 0, 1)), xp.permute_dims(out, (1, 2, 0, 3)), mine
    )  # (H, n_q, B, d_v)
    total = xp.where(empty, xp.ones_like(total), total)
    out = xp.permute_dims(product, (2, 0, 1, 3)) / total[..., None]
    return out, xp.where(empty, largest, base + xp.log(total))


def backward(backend: Backend, dout: Array, saved: Saved) -> AttentionGrads:
    """Return the gradients: each page's from what its rows are over all their keys."""
    reading, out, lse = saved
    xp, x, put = backend.namespace(), reading.arrays, backend.update_slice
    structured = "bias_structure" in reading.options

    def one(carry: Any, i: Any) -> tuple[Any, tuple[()]]:
        group, (dq, dk, dv, dbias) = reading.group(i), carry
        dout_, out_, lse_ = (xp.take(y, group.entries, axis=0) for y in (dout, out, lse))
        kernel = _attention.kernel_for(group.problem, reading.options["kernel"])
        grads = kernel.backward(dout_, None, group.q, group.k, group.v, out_, lse_, group.problem)
        dq = backend.index_add(dq, group.entries, widen(xp, grads[0]))

        def add(total: Array, part: Array) -> Array:  # pages that two groups have are zero in one of them
            return put(total, reading.part(total, i) + part, reading.start(i), 0)

        dk, dv = add(dk, grads[1]), add(dv, grads[2])
        if dbias is not None:
            dbias = dbias + grads[3] if structured else add(dbias, grads[3])
        return (dq, dk, dv, dbias), ()

    zeros = (xp.zeros_like(y) for y in (widen(xp, x["q"]), x["k"], x["v"]))
    start = (*zeros, xp.zeros_like(x["bias"]) if "bias" in x else None)
    (dq, dk, dv, dbias), _ = backend.scan(one, start, reading.groups)
    dsinks = None
    if "sinks" in x:
        shift = xp.sum(widen(xp, dout) * widen(xp, out), axis=-1)  # (B, H, n_q)
        lse = xp.where(lse == -math.inf, xp.zeros_like(lse), lse)
        weights = xp.exp(cast(xp, x["sinks"], lse.dtype)[None, :, None] - lse)
        dsinks = cast(xp, -xp.sum(weights * shift, axis=(0, 2)), x["sinks"].dtype)
    return AttentionGrads(cast(xp, dq, x["q"].dtype), dk, dv, dbias, dsinks)


OPERATION = Operation("PagedKVCache.attention", forward, backward)
