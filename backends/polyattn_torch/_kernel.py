"""torch's fused attention as a kernel: which problems it supports, and by which calls. Does not import torch.

The fused operations support two patterns, all keys and the causal square that
starts at the upper left, and on the CPU also a mask. A problem with causality,
windows or lengths is split into parts with these patterns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics, TiledKernel

from ._tracing import opaque

__all__ = ["FusedKernel", "Part", "parts", "varies"]

TILED = TiledKernel()
MASKED = 2**21  # elements of the mask of one part: 8 MiB in float32
LEAST = 64  # the least number of rows of a masked part


class Part(NamedTuple):
    """One call: a range of rows and a range of keys."""

    rows: slice
    keys: slice
    causal: bool = False
    """Row i of the part attends to its keys up to the i-th; there are as many keys as rows."""
    masked: bool = False
    """A mask excludes some of the pairs."""
    more: bool = False
    """The part before has other keys of the same rows, so the results are merged."""


class FusedKernel:
    """The kernel behind torch's ``scaled_dot_product_attention``, with polyattn's cache in place of a graph."""

    name = "fused"
    joins_statistics = True

    def supports(self, problem: Problem) -> str | None:
        """Support the problems that the fused operations compute as polyattn defines them."""
        if problem.softcap is not None:
            return "the fused operations have no softcap"
        if problem.dropout:
            return "the fused operations drop weights by torch's own random numbers"
        if problem.bias is not None:
            return "the fused operations give no gradient of a bias"
        if problem.structured:
            return "a structured mask is left to the generic kernel, which skips its tiles"
        if problem.scale <= 0:
            return f"the fused operations scale after they exclude, so the scale must be positive, not {problem.scale}"
        device = (problem.device or "").partition(":")[0]
        if device == "cuda":
            from ._operations import cuda_reason

            if any(part.masked for part in parts(problem)):
                return "no mask is given to the fused operations on CUDA, nor what needs one"
            return cuda_reason(problem)
        return None if device == "cpu" else f"there is no fused operation on {problem.device}"

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Run the fused forward on each part; if a result is not finite or torch traces, the generic kernel."""
        from ._fused import forward

        result = None if opaque(q, k, v) else forward(q, k, v, problem, parts(problem))
        return TILED.forward(q, k, v, problem) if result is None else result

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Run the fused backward on each part, with out and log-sum-exp of the whole rows; else the generic kernel."""
        from ._fused import backward

        arrays = (dout, dlse, q, k, v, out)
        opaque_ = opaque(*arrays, *statistics)
        result = None if opaque_ else backward(*arrays, statistics, problem, parts(problem))
        return TILED.backward(*arrays, statistics, problem) if result is None else result


def parts(problem: Problem) -> list[Part]:
    """Return the calls that compute a problem; rows in none of them are empty, and no row attends to other keys."""
    n_q, n_k = problem.sizes.n_q, problem.sizes.n_k
    if isinstance(problem.key_lengths, int):
        n_k = min(n_k, problem.key_lengths)
    if varies(problem):
        return list(_bands(problem, n_q, n_k))
    masked = problem.mask is not None or not isinstance(problem.key_lengths, int | None)
    if problem.reach[1] is None:
        found = [Part(slice(0, n_q), slice(0, n_k), masked=masked)]
    else:
        found = list(_triangle(problem.q_offset, n_q, n_k, masked))
    return [part for part in found if part.rows.start < part.rows.stop and part.keys.start < part.keys.stop]


def varies(problem: Problem) -> bool:
    """Return whether rows need different masks: not just causality with a static offset, or a mask of the keys."""
    if problem.q_segments is not None or (problem.mask is not None and problem.mask.shape[-2:-1] not in ((), (1,))):
        return True
    left, right = problem.reach
    return left is not None or (right is not None and not (right == 0 and isinstance(problem.q_offset, int)))


def _triangle(offset: int, n_q: int, n_k: int, masked: bool) -> Iterator[Part]:
    """Yield the parts of a causal problem: the keys common to all rows, the square, the rows with all keys."""
    first = min(max(0, -offset), n_q)  # rows before it are empty
    last = min(max(n_k - offset, first), n_q)  # rows from it attend to all keys
    if last - first == 1:
        yield Part(slice(first, last), slice(0, offset + last), masked=masked)
    elif last > first:
        rows, seen = slice(first, last), offset + first
        if seen:
            yield Part(rows, slice(0, seen), masked=masked)
        yield Part(rows, slice(seen, offset + last), causal=True, masked=masked, more=seen > 0)
    yield Part(slice(last, n_q), slice(0, n_k), masked=masked)


def _bands(problem: Problem, n_q: int, n_k: int) -> Iterator[Part]:
    """Yield ranges of rows short enough for a small mask, each with the range of its allowed keys."""
    mask, by_item = problem.mask, (problem.q_offset, problem.key_lengths, problem.q_segments)
    items = (mask is not None and math.prod(mask.shape[:-3]) > 1) or any(not isinstance(x, int | None) for x in by_item)
    copies = (math.prod(problem.sizes.batch) if items else 1) * (1 if mask is None else math.prod(mask.shape[-3:-2]))
    step, (left, right), offset = max(MASKED // (copies * max(n_k, 1)), LEAST), problem.reach, problem.q_offset
    if left is not None and right is not None:  # with more rows, each row excludes more of the keys of the part
        step = min(step, max(left + right, 4 * LEAST))
    for start in range(0, n_q, step):
        stop = min(start + step, n_q)
        low, high = 0, n_k
        if isinstance(offset, int):
            low = 0 if left is None else max(0, offset + start - left)
            high = n_k if right is None else min(n_k, offset + stop + right)
        if low < high:
            yield Part(slice(start, stop), slice(low, high), masked=True)
