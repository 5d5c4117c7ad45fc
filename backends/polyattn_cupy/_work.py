"""An attention problem with flattened axes, its tiles, and its description for the device code.

The query heads of a key head are stacked as the rows of one matrix, so that keys and
values are never repeated and the products sum their gradients. A tile of scores spans
all heads of a few batch entries. The host reads no values: where pairs are excluded,
products are taken over the finite entries, and a device function adds the other entries
for the allowed pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import cupy
import numpy as np

from polyattn.backend import Array, Problem, dtype_name

from ._device import TILE, launch, product

__all__ = ["Operand", "Work", "matrices", "operand"]

SCORES = 2**23  # per tile, over all heads: 32 MiB in float32, enough work to hide the launches
SIDE, LEAST = 1024, 16
MATRICES = 2**16 - 1  # per product: CUDA's limit for the third axis of a grid
LIMIT, ENDLESS = 2**60, 2**62  # positions are clipped to ±LIMIT, so that their sums fit 64 bits


class Operand(NamedTuple):
    """The right operand of a product; ``finite``, ``odd`` and ``some`` are None where no pair is excluded."""

    values: Array  # (N, n, d)
    finite: Array = None  # the same, with zeros in place of NaN and infinity
    odd: Array = None  # (N, n): the rows with a NaN or infinity
    some: Array = None  # whether any row has one

    def cut(self, rows: slice) -> Operand:
        """Return some of the rows."""
        values, finite, odd = (None if x is None else x[:, rows] for x in self[:3])
        return Operand(values, finite, odd, self.some)


def operand(x: Array, excludes: bool) -> Operand:
    """Prepare the right operand of a product; ``excludes`` says whether pairs may be excluded."""
    if not excludes:
        return Operand(x)
    finite = cupy.isfinite(x)
    odd = cupy.logical_not(cupy.all(finite, axis=-1))
    return Operand(x, cupy.where(finite, x, x.dtype.type(0)), odd, cupy.any(odd, keepdims=True))


def matrices(x: Array) -> Array:
    """Reshape ``(B, kv_heads[, groups], n, d)`` to ``(N, rows, d)``: a view where ``x`` is contiguous."""
    rows = x.shape[2:-1]  # (n,), or (groups, n)
    return cupy.ascontiguousarray(x).reshape(x.shape[0] * x.shape[1], math.prod(rows), x.shape[-1])


class Work:
    """One problem: its layout, its tiles, and the current tile of the device code."""

    def __init__(self, problem: Problem) -> None:
        sizes = self.sizes = problem.sizes
        self.problem = problem
        self.dtype = cupy.float64 if problem.dtype == "float64" else cupy.float32  # of scores and sums
        self.single = problem.dtype != "float16"  # inputs, weights and scores have one dtype
        self.bias = None if problem.bias is None else self.pairs(problem.bias)
        self.types = (problem.dtype, problem.dtype if self.bias is None else dtype_name(self.bias.dtype))
        self.batch = math.prod(sizes.batch)
        n_k = min(sizes.n_k, SIDE)
        n_q = min(sizes.n_q, SIDE, max(LEAST, SCORES // (sizes.heads * n_k)))
        self.n_k = min(sizes.n_k, max(n_k, SCORES // (sizes.heads * n_q)))  # longer for few queries
        entries = min(SCORES // (sizes.heads * n_q * self.n_k), MATRICES // sizes.kv_heads)
        entries = min(self.batch, max(1, entries))
        self.scores = entries * sizes.heads * n_q * self.n_k
        self.batches = [slice(i, min(i + entries, self.batch)) for i in range(0, self.batch, entries)]
        self.query_tiles = [slice(i, min(i + n_q, sizes.n_q)) for i in range(0, sizes.n_q, n_q)]
        self.struct, self.pointed_to = self._described()
        left, right = problem.reach
        self.bounded = left is not None or right is not None
        self.pairwise = any(x is not None for x in (problem.mask, problem.bias, problem.q_segments))
        # a static length excludes no pair of a tile: no tile contains the keys past it
        self.lengths = problem.key_lengths is not None and not isinstance(problem.key_lengths, int)
        self.excludes = self.bounded or self.pairwise or self.lengths
        self.at = (slice(0), slice(0), slice(0))

    # ---- layout ----------------------------------------------------------------------------------------------

    def queries(self, x: Array) -> Array:
        """Return q, out or dout as (B, kv_heads, groups, n_q, d), broadcast and contiguous."""
        sizes = self.sizes
        x = cupy.broadcast_to(x, (*sizes.scores[:-1], x.shape[-1]))
        groups = sizes.heads // sizes.kv_heads
        return cupy.ascontiguousarray(x).reshape(self.batch, sizes.kv_heads, groups, sizes.n_q, x.shape[-1])

    def keys(self, x: Array) -> Array:
        """Return k or v as (B, kv_heads, n_k, d), broadcast and contiguous."""
        x = cupy.broadcast_to(x, (*self.sizes.batch, *x.shape[-3:]))
        return cupy.ascontiguousarray(x).reshape(self.batch, *x.shape[-3:])

    def like(self, dx: Array, x: Array) -> Array:
        """Return a gradient in the shape and dtype of its argument, summed over the axes that were broadcast."""
        shape = (*self.sizes.batch, *x.shape[-3:])
        extra = len(shape) - x.ndim
        axes = (*range(extra), *(i for i in range(extra, len(shape)) if x.shape[i - extra] == 1 != shape[i]))
        dx = dx.reshape(shape)
        return (cupy.sum(dx, axis=axes) if axes else dx).reshape(x.shape).astype(x.dtype)

    def pairs(self, x: Array) -> Array:
        """View a mask or bias as (B or 1, H or 1, n_q or 1, n_k or 1)."""
        x = x[(None,) * (len(self.sizes.scores) - x.ndim)]
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    def integers(self, x: Array, shape: tuple[int, ...]) -> Array:
        """Return integers broadcast to the batch axes and ``shape``, in 64 bits."""
        x = cupy.broadcast_to(x.astype(cupy.int64), (*self.sizes.batch, *shape))
        return cupy.ascontiguousarray(x).reshape(self.batch, *shape)

    def positions(self, x: Array) -> Array:
        """Return offsets or lengths, one for each batch entry, clipped to ±LIMIT."""
        if x.dtype.name == "uint64":
            x = cupy.minimum(x, x.dtype.type(LIMIT))
        return cupy.clip(self.integers(x, ()), -LIMIT, LIMIT)

    def _described(self) -> tuple[Any, list[Array]]:
        """Return the struct for the device code, and the arrays that it points to, which must be kept alive."""
        problem, sizes, struct = self.problem, self.sizes, np.zeros(1, dtype=TILE)
        left, right = (ENDLESS if x is None else min(x, LIMIT) for x in problem.reach)
        told: dict[str, Any] = {
            "kv_heads": sizes.kv_heads, "groups": sizes.heads // sizes.kv_heads, "all_q": sizes.n_q,
            "all_k": sizes.n_k, "left": left, "right": right, "length": sizes.n_k, "scale": problem.scale,
            "softcap": problem.softcap or 0.0,
        }  # fmt: skip
        arrays: dict[str, Array] = {}
        for name, value in (("offset", problem.q_offset), ("length", problem.key_lengths)):
            if isinstance(value, int):
                told[name] = max(-LIMIT, min(LIMIT, value))
            elif value is not None:
                arrays[f"{name}s"] = self.positions(value)
        if problem.q_segments is not None and problem.k_segments is not None:
            arrays["q_segments"] = self.integers(problem.q_segments, (sizes.n_q,))
            arrays["k_segments"] = self.integers(problem.k_segments, (sizes.n_k,))
        for name, x in (("mask", None if problem.mask is None else self.pairs(problem.mask)), ("bias", self.bias)):
            if x is not None:
                arrays[name] = x
                for axis, n, stride in zip(("batch", "head", "query", "key"), x.shape, x.strides, strict=True):
                    told[f"{name}_{axis}"] = 0 if n == 1 else stride // x.itemsize
        told["plain"] = not (arrays.keys() & {"mask", "bias", "q_segments"} or told["softcap"])
        for name, value in {**told, **{name: x.data.ptr for name, x in arrays.items()}}.items():
            struct[name] = value
        return struct, list(arrays.values())

    # ---- powers of two that prevent overflow -----------------------------------------------------------------
    #
    # The bounds assume keys and values at the maximum of their dtype, which saves a pass over them: scaling by a
    # power of two is exact. Float16 inputs cannot overflow, because their products and sums are in float32.
    # A row with a largest score out of range is right in the forward only: its statistics are infinite. To compute
    # them again in units, the backward would have to read them on the host, or take another pass in every call.

    @property
    def factor(self) -> float:
        """The factor of the weights in their product with the values."""
        return 2.0 ** -(self.sizes.n_k.bit_length() + 2) if self.single else 1.0

    def units(self, q: Array) -> Array:
        """Return the divisors of the scores of each row, two powers of two: ``(B, kv_heads, groups, n_q, 2)``."""
        shape = (*q.shape[:-1], 1)
        if not self.single:
            return cupy.ones((*q.shape[:-1], 2), dtype=self.dtype)
        size = cupy.max(cupy.where(cupy.isfinite(q), abs(q), q.dtype.type(0)), axis=-1).reshape(shape)
        more = math.ceil(math.log2(max(self.sizes.d_k, 1)) + math.log2(max(abs(self.problem.scale), 1.0))) + 4
        exponent = cupy.frexp(size)[1] + more
        exponent = cupy.clip(exponent, 0, 2 * np.finfo(self.dtype).maxexp - 4)
        one = cupy.ldexp(cupy.ones(shape, dtype=self.dtype), exponent // 2)
        other = cupy.ldexp(cupy.ones(shape, dtype=self.dtype), exponent - exponent // 2)
        return cupy.concatenate((one, other), axis=-1)

    def in_units(self, q: Array) -> Array:
        """Return queries divided by the units of their rows."""
        if not self.single:
            return q
        units = self.units(q)
        return q / units[..., :1] / units[..., 1:]

    def divided(self, x: Array, units: Array) -> Array:
        """Return scores (…, n_q) divided by the units of their rows; with a softcap, unchanged."""
        return x if self.problem.softcap else x / units[..., 0] / units[..., 1]

    def in_full(self, x: Array, units: Array) -> Array:
        """Reverse :meth:`divided`."""
        return x if self.problem.softcap else x * units[..., 0] * units[..., 1]

    def unit_of_gradients(self, dout: Array) -> Array:
        """Return the power of two that divides dout and all gradients during the computation: 0-d."""
        if not self.single:
            return cupy.ones((), dtype=self.dtype)
        size = cupy.max(cupy.where(cupy.isfinite(dout), abs(dout), dout.dtype.type(0)))
        exponent = cupy.frexp(size)[1] + (math.ceil(math.log2(max(self.sizes.d_v, 1))) + 10)
        return cupy.ldexp(cupy.ones((), dtype=self.dtype), cupy.clip(exponent, 0, np.finfo(self.dtype).maxexp - 2))

    # ---- tiles -----------------------------------------------------------------------------------------------

    def room(self, dtype: Any = None) -> Array:
        """Return a buffer for the largest tile, by default in the dtype of the scores."""
        return cupy.empty(self.scores, dtype=self.dtype if dtype is None else dtype)

    def key_tiles(self, queries: slice) -> Iterator[slice]:
        """Yield tiles of the keys that any of the queries may attend to, according to the static arguments."""
        problem, (left, right) = self.problem, self.problem.reach
        first, last, offset, lengths = 0, self.sizes.n_k, problem.q_offset, problem.key_lengths
        if isinstance(offset, int):
            first = first if left is None else max(first, offset + queries.start - left)
            last = last if right is None else min(last, offset + queries.stop + right)
        if isinstance(lengths, int):
            last = min(last, lengths)
        for start in range(first, last, self.n_k):
            yield slice(start, min(start + self.n_k, last))

    def start(self, shape: tuple[int, ...], units: Array) -> tuple[Array, Array]:
        """Return the total and the largest score of each row before the first key: those of the sinks, if any."""
        if self.problem.sinks is None:
            return cupy.zeros(shape, dtype=self.dtype), cupy.full(shape, -cupy.inf, dtype=self.dtype)
        sinks = self.problem.sinks.astype(self.dtype).reshape(*shape[1:3], 1)  # (kv_heads, groups, 1)
        largest = cupy.ascontiguousarray(self.divided(cupy.broadcast_to(sinks, shape).copy(), units))
        one = cupy.exp(largest - largest)  # NaN for a sink of NaN or infinity
        return cupy.where(largest == -cupy.inf, one.dtype.type(0), one), largest

    def go_to(self, batch: slice, queries: slice, keys: slice) -> None:
        """Make this the current tile of the device code."""
        self.at, struct = (batch, queries, keys), self.struct
        struct["batch"], struct["query"], struct["key"] = batch.start, queries.start, keys.start
        struct["n_q"], struct["n_k"] = queries.stop - queries.start, keys.stop - keys.start

    def tile(self, memory: Array) -> Array:
        """Return the buffer's part for the current tile, (N, rows, n_k)."""
        batch, queries, keys = (x.stop - x.start for x in self.at)
        matrices, rows = batch * self.sizes.kv_heads, queries * (self.sizes.heads // self.sizes.kv_heads)
        return memory[: matrices * rows * keys].reshape(matrices, rows, keys)

    def excluding(self) -> bool:
        """Return whether a pair of the current tile may be excluded."""
        (left, right), offset, (_, queries, keys) = self.problem.reach, self.problem.q_offset, self.at
        if self.pairwise or self.lengths or not isinstance(offset, int):
            return self.excludes
        ahead, behind = keys.stop - 1 - (offset + queries.start), offset + queries.stop - 1 - keys.start
        return (right is not None and ahead > right) or (left is not None and behind > left)

    # ---- device functions and products of a tile -------------------------------------------------------------

    def by_row(self, name: str, scores: Array, *arguments: Any) -> None:
        """Launch a device function with one block for each row."""
        warps = min(8, -(-scores.shape[-1] // 128))
        launch(name, self.types, scores.shape[0] * scores.shape[1], warps, scores, *arguments, self.struct)

    def add_product(self, tile: Array, x: Operand, out: Array, *, transposed: bool = False) -> None:
        """Add ``tile @ x`` or ``tileᵀ @ x`` to ``out``; excluded pairs add nothing, even if ``x`` is NaN there."""
        isolated = x.finite is not None and self.excluding()
        product(tile, x.finite if isolated else x.values, out, transpose_a=transposed, add=True)
        if isolated:
            steps = (y.strides[0] // y.itemsize for y in (x.values, x.odd, out))
            blocks = out.shape[0] * out.shape[1]
            arguments = (tile, x.values, x.odd, x.some, out, *steps, out.shape[-1], int(transposed), self.struct)
            launch("put_back", self.types, blocks, 2, *arguments)

    def add_bias(self, dbias: Array, raw: Array) -> None:
        """Add the current tile's part to the gradient of the bias."""
        batch, queries, keys = self.at
        lengths = (batch.stop - batch.start, self.sizes.heads, queries.stop - queries.start, keys.stop - keys.start)
        axes = tuple(axis for axis, n in enumerate(dbias.shape) if n == 1)
        whole = (batch, slice(None), queries, keys)
        here = tuple(slice(None) if n == 1 else s for n, s in zip(dbias.shape, whole, strict=True))
        share = raw.reshape(lengths)
        dbias[here] += cupy.sum(share, axis=axes, keepdims=True) if axes else share
