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
from typing import Any, NamedTuple

from ..backend import Array, Backend, Place
from ..functional._arguments import Settings
from ..functional._attention import backward as attention_backward
from ..functional._attention import forward as attention_forward
from ..functional._attention import prepare as prepare_attention
from ..functional._operation import Operation
from ..kernels import cast, merge, wide, widen
from ..kernels._exclusion import matmul_excluding

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
        return Group(arrays, owners, entries)

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
    """Return out (B, H, n_q, d_v); save the arrays, out and lse."""
    out, lse = _compiled(backend, settings, pages)(*arrays)
    return out, (*arrays, out, lse)


@functools.lru_cache(maxsize=256)
def _compiled(backend: Backend, settings: Settings, pages: int) -> Callable[..., tuple[Array, Array]]:
    """Return the forward as one program, where the library compiles any."""
    return backend.jit(functools.partial(_forward, backend, settings, pages))


def _forward(backend: Backend, settings: Settings, pages: int, *arrays: Array) -> tuple[Array, Array]:
    """Return out (B, H, n_q, d_v) and lse (B, H, n_q)."""
    x = dict(zip(ARRAYS, arrays, strict=True))
    xp, q = backend.namespace(), x["q"]
    reading = Reading(backend, x, settings, pages)
    rows, device = tuple(q.shape[:-1]), backend.native_device(settings.device)

    def one(i: Any) -> tuple[Array, Array]:
        group = reading.group(i)
        out, saved = attention_forward(backend, *group.arrays, settings=settings)
        return joined(backend, group.owners, widen(xp, out), saved[-1], rows[0])

    if reading.groups == 1:
        out, lse = one(0)
    else:
        dtype = wide(xp, q.dtype)
        nothing = (
            xp.zeros((*rows, settings.sizes.d_v), dtype=dtype, device=device),
            xp.full(rows, -math.inf, dtype=dtype, device=device),
        )
        (out, lse), _ = backend.scan(lambda carry, i: (merge(xp, carry, one(i)), ()), nothing, reading.groups)
    if x["sinks"] is not None:  # one more key, whose value is zero
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


def backward(
    backend: Backend, dout: Array, saved: tuple[Any, ...], *, settings: Settings, pages: int
) -> tuple[Any, ...]:
    """Return a gradient for each array: each page's from what its rows are over all their keys."""
    *arrays, out, lse = saved
    x = dict(zip(ARRAYS, arrays, strict=True))
    xp, table = backend.namespace(), settings.bias is not None
    reading = Reading(backend, x, settings, pages)
    put = backend.update_slice

    def one(carry: Any, i: Any) -> tuple[Any, tuple[()]]:
        group, (dq, *totals) = reading.group(i), carry
        dout_, out_, lse_ = (xp.take(y, group.entries, axis=0) for y in (dout, out, lse))
        saved = (*group.arrays, out_, lse_)
        dq_, *parts = attention_backward(backend, dout_, saved, settings=settings)[:4]
        dq = backend.index_add(dq, group.entries, widen(xp, dq_))
        for k, (name, total, part) in enumerate(zip(("k", "v", "bias"), totals, parts, strict=True)):
            if part is not None and name == "bias" and table:
                totals[k] = total + part
            elif part is not None:  # pages that two groups have are zero in one of them
                totals[k] = put(total, reading.part(total, i) + part, reading.start(i), 0)
        return (dq, *totals), ()

    zeros = (None if y is None else xp.zeros_like(y) for y in (widen(xp, x["q"]), x["k"], x["v"], x["bias"]))
    (dq, dk, dv, dbias), _ = backend.scan(one, tuple(zeros), reading.groups)
    dsinks = None
    if x["sinks"] is not None:
        shift = xp.sum(widen(xp, dout) * widen(xp, out), axis=-1)  # (B, H, n_q)
        lse = xp.where(lse == -math.inf, xp.zeros_like(lse), lse)
        weights = xp.exp(cast(xp, x["sinks"], lse.dtype)[None, :, None] - lse)
        dsinks = cast(xp, -xp.sum(weights * shift, axis=(0, 2)), x["sinks"].dtype)
    return cast(xp, dq, x["q"].dtype), dk, dv, dbias, dsinks, *(None for _ in ARRAYS[5:])


operation = Operation("PagedKVCache.attention", forward, backward, prepare)
