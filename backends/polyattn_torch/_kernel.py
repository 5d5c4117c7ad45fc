"""torch's fused attention as a kernel: which problems it computes, and as which calls. Without torch itself.

The fused operations know two patterns, every key and the square upper-left
triangle, and on the CPU a mask besides. What causality, windows and lengths
leave of a problem is cut into parts of these patterns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics, TiledKernel

__all__ = ["FusedKernel", "Part", "parts", "varies"]

TILED = TiledKernel()
MASKED = 2**21  # pairs for which a mask is held at a time: 8 MiB in float32
LEAST = 64  # rows of a masked part


class Part(NamedTuple):
    """One call: some rows against some keys."""

    rows: slice
    keys: slice
    causal: bool = False
    """The rows see the upper-left triangle of the keys, which are as many."""
    masked: bool = False
    """A mask excludes some of the pairs."""
    more: bool = False
    """The rows have seen other keys in the part before."""


class FusedKernel:
    """The kernel behind torch's ``scaled_dot_product_attention``, called with our cache in place of a graph."""

    name = "fused"
    joins_statistics = True

    def supports(self, problem: Problem) -> str | None:
        """Support what the fused operations compute exactly as the semantics say."""
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
        """Run the fused forward on each part; hand what is not finite, or followed by a transform, to the tiles."""
        from ._fused import forward, opaque

        result = None if opaque(q, k, v) else forward(q, k, v, problem, parts(problem))
        return TILED.forward(q, k, v, problem) if result is None else result

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Run the fused backward on each part, with the out and log-sum-exp of the whole rows."""
        from ._fused import backward, opaque

        arrays = (dout, dlse, q, k, v, out)
        opaque_ = opaque(*arrays, *statistics)
        result = None if opaque_ else backward(*arrays, statistics, problem, parts(problem))
        return TILED.backward(*arrays, statistics, problem) if result is None else result


def parts(problem: Problem) -> list[Part]:
    """Return the calls that make up a problem; rows and keys in none of them are empty or unseen."""
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
    """Say whether the rows need a mask each: more than a triangle, and more than one that is the same for all."""
    if problem.q_segments is not None or (problem.mask is not None and problem.mask.shape[-2:-1] not in ((), (1,))):
        return True
    left, right = problem.reach
    return left is not None or (right is not None and not (right == 0 and isinstance(problem.q_offset, int)))


def _triangle(offset: int, n_q: int, n_k: int, masked: bool) -> Iterator[Part]:
    """Yield the parts of a causal problem: the keys that all rows see, the square, and the rows that see all keys."""
    first = min(max(0, -offset), n_q)  # the rows before it see nothing
    last = min(max(n_k - offset, first), n_q)  # from it on they see everything
    if last - first == 1:
        yield Part(slice(first, last), slice(0, offset + last), masked=masked)
    elif last > first:
        rows, seen = slice(first, last), offset + first
        if seen:
            yield Part(rows, slice(0, seen), masked=masked)
        yield Part(rows, slice(seen, offset + last), causal=True, masked=masked, more=seen > 0)
    yield Part(slice(last, n_q), slice(0, n_k), masked=masked)


def _bands(problem: Problem, n_q: int, n_k: int) -> Iterator[Part]:
    """Yield rows in bands so narrow that their mask is small, each with the keys in its reach."""
    mask, by_item = problem.mask, (problem.q_offset, problem.key_lengths, problem.q_segments)
    items = (mask is not None and math.prod(mask.shape[:-3]) > 1) or any(not isinstance(x, int | None) for x in by_item)
    copies = (math.prod(problem.sizes.batch) if items else 1) * (1 if mask is None else math.prod(mask.shape[-3:-2]))
    step, (left, right), offset = max(MASKED // (copies * max(n_k, 1)), LEAST), problem.reach, problem.q_offset
    if left is not None and right is not None:  # the more rows, the more keys that most of them do not see
        step = min(step, max(left + right, 4 * LEAST))
    for start in range(0, n_q, step):
        stop = min(start + step, n_q)
        low, high = 0, n_k
        if isinstance(offset, int):
            low = 0 if left is None else max(0, offset + start - left)
            high = n_k if right is None else min(n_k, offset + stop + right)
        if low < high:
            yield Part(slice(start, stop), slice(low, high), masked=True)
