"""The forward of the blocked kernel: tiles in reused buffers, several threads, every product by the BLAS.

Online softmax (Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022),
with few passes over the scores: the queries are scaled, the keys transposed once,
the rows summed by a matrix-vector product, and the result is divided at the end.
Where the norms of queries and keys show that exp cannot overflow, the kernel
computes exp(score) without the largest score.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyattn.backend import Array, Problem, RowStatistics

from ._layout import WORTHWHILE, Call, Task, dense, folded
from ._threads import run, thread_count

__all__ = ["Buffers", "NotFinite", "cap", "finite", "forward", "moderate", "score_bound", "threads_for", "wide"]

SAFE = {"float32": 30.0, "float64": 250.0}
"""A bound of the scores for which exp(score), and its sums and products with values, neither overflow nor underflow."""
LARGE = 32.0
"""The largest score that forward and backward may compute by different products. The row statistics may be joined to
one log-sum-exp up to half of it, where its rounding error is below 5e-7."""
PACK = 128  # the least number of rows for which a transposed copy of the keys is faster
SMALL = {"float32": 1e-34, "float64": 1e-280}
"""The least sum of squares of a tile's unnormalised results that shows that no underflow lost digits."""


class NotFinite(Exception):
    """A score or result is not finite, so the generic kernel must compute the problem."""


def forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return out and the row statistics; raise :class:`NotFinite` if a score or result is not finite."""
    sizes, dtype = problem.sizes, wide(problem)
    out = np.empty((*sizes.scores[:-1], sizes.d_v), dtype=q.dtype)
    statistics = RowStatistics(*(np.zeros(sizes.scores[:-1], dtype=dtype) for _ in range(2)))
    inner, qkv, results = folded(problem, (q, k, v), (out, *statistics))
    call = Call(inner, threads_for(inner), dtype)
    run(lambda: Forward(call, qkv, results).task, call.tasks(), call.threads)
    return out, statistics


class Forward:
    """The forward of one task at a time, with the buffers of one thread."""

    def __init__(self, call: Call, qkv: list[Array], results: list[Array]) -> None:
        self.call, (self.q, self.k, self.v), (self.out, self.largest, self.log_total) = call, qkv, results
        self.buffers = Buffers(call.dtype)

    def task(self, task: Task) -> None:
        """Prepare the keys and queries of a task, and compute its queries tile by tile."""
        call, problem = self.call, self.call.problem
        first, last = call.keys(task, task.start, task.stop)
        k, v = (dense(x[task.entry][task.kv_heads, first:last], call.dtype) for x in (self.k, self.v))
        q = call.by_row(self.q, task, task.start, task.stop)  # (kv heads, queries, groups, d_k)
        q = np.multiply(q, problem.scale, out=self.buffers.take("q", q.shape), dtype=call.dtype)
        bound = score_bound(q, k, problem)
        if not math.isfinite(bound):
            raise NotFinite
        tiles = []
        for start, stop in call.tiles(task):
            here = slice(start - first, stop - first)
            tiles.append((start, stop, self.transposed(k, here, q.shape[1]), v[:, here]))
        for start in range(task.start, task.stop, call.rows):
            rows = (start, min(start + call.rows, task.stop))
            q_t = q[:, rows[0] - task.start : rows[1] - task.start]
            q_t = q_t.reshape(q_t.shape[0], -1, q_t.shape[3])  # (kv heads, rows, d_k)
            safe = bound <= SAFE[call.dtype.name]
            if not (safe and self.rows(task, rows, q_t, tiles, safe=True)):
                self.rows(task, rows, q_t, tiles, safe=False)

    def transposed(self, k: Array, here: slice, n_q: int) -> Array:
        """Return some keys as ``(kv heads, d_k, keys)``, copied to contiguous memory where many queries use them."""
        k_t = k[:, here].swapaxes(1, 2)
        if n_q * self.call.groups < PACK:
            return k_t
        packed = self.buffers.take(f"k{here.start}", k_t.shape)
        np.copyto(packed, k_t)
        return packed

    def rows(self, task: Task, rows: tuple[int, int], q: Array, tiles: list[Any], *, safe: bool) -> bool:
        """Compute a tile of queries; return whether the result is accurate. ``safe``: exp of no score overflows."""
        call, take = self.call, self.buffers.take
        first, last = call.keys(task, *rows)
        total, largest = self._sinks(task, rows, q.shape[:2], safe=safe)  # (kv heads, rows)
        out = take("out", (*q.shape[:2], self.v.shape[-1]))
        part = out  # the first product is written to out, later ones are added
        for start, stop, k_t, v_t in tiles:
            if start < first or stop > last:
                a, b = max(start, first), min(stop, last)
                if a >= b:
                    continue
                k_t, v_t = k_t[:, :, a - start : b - start], v_t[:, a - start : b - start]
                start, stop = a, b
            scores = np.matmul(q, k_t, out=take("scores", (*q.shape[:2], stop - start)))
            excluded = None if call.plain else self._altered(task, rows, (start, stop), scores)
            if safe:
                np.exp(scores, out=scores)
                if excluded is not None:
                    np.copyto(excluded[1], 0, where=excluded[0])
            else:
                if excluded is not None:
                    np.copyto(excluded[1], -math.inf, where=excluded[0])
                self._rebase(scores, None if part is out else out, total, largest)
            total += np.matmul(scores, self.buffers.ones(stop - start))
            if call.problem.dropout:
                scores *= call.kept(task, rows, (start, stop), take)
            np.matmul(scores, v_t, out=part)
            if part is out:
                part = take("part", out.shape)
            else:
                out += part
        if part is out:
            out.fill(0)
        return self._finish(task, rows, out, total, largest, safe=safe)

    def _altered(
        self, task: Task, rows: tuple[int, int], columns: tuple[int, int], scores: Array
    ) -> tuple[Array, Array] | None:
        """Apply softcap and bias to a tile of scores; return the excluded pairs, and the scores viewed by head."""
        call, problem = self.call, self.call.problem
        cap(scores, problem)
        excluded = call.excluded(task, rows, columns)
        if excluded is None and problem.bias is None:
            return None
        by_head = scores.reshape(scores.shape[0], rows[1] - rows[0], -1, scores.shape[2])
        if problem.bias is not None:
            by_head += call.bias(task, rows, columns)
        return None if excluded is None else (excluded, by_head)

    def _rebase(self, scores: Array, out: Array | None, total: Array, largest: Array) -> None:
        """Compute exp(score − largest) in place, and rescale the sums so far to the new largest score."""
        before = largest.copy()
        np.maximum(largest, scores.max(axis=-1), out=largest)
        base = np.where(np.isneginf(largest), 0, largest)  # −inf: the row has no score yet
        scores -= base[..., None]
        np.exp(scores, out=scores)
        if not np.array_equal(before, largest):
            shrink = np.exp(before - base)
            total *= shrink
            if out is not None:
                out *= shrink[..., None]

    def _sinks(self, task: Task, rows: tuple[int, int], shape: tuple[int, ...], *, safe: bool) -> tuple[Array, Array]:
        """Return the total and the largest score of each row before the first key: those of the sinks, if any."""
        dtype, sinks = self.call.dtype, self.call.problem.sinks
        total, largest = np.zeros(shape, dtype), np.full(shape, 0 if safe else -math.inf, dtype)
        if sinks is not None:
            of_rows = sinks[self.call.heads(task)].reshape(-1, 1, self.call.groups)  # (kv heads, 1, groups)
            of_rows = np.broadcast_to(of_rows, (shape[0], rows[1] - rows[0], self.call.groups)).reshape(shape)
            if safe:
                np.exp(of_rows, out=total, dtype=dtype)
            else:
                largest[...] = of_rows
                total[...] = of_rows != -math.inf
        return total, largest

    def _finish(
        self, task: Task, rows: tuple[int, int], out: Array, total: Array, largest: Array, *, safe: bool
    ) -> bool:
        """Divide by the totals and write the rows to the results; return False if they may have lost digits."""
        if safe and not SMALL[self.call.dtype.name] <= float(np.vdot(out, out)) < math.inf:
            return False
        if not finite(out):
            raise NotFinite
        by_head = (out.shape[0], rows[1] - rows[0], self.call.groups)
        divisor = (total if total.all() else np.where(total == 0, 1, total)).reshape(*by_head, 1)
        if self.call.problem.dropout:
            divisor = divisor * (1 - self.call.problem.dropout)
        to = self.call.by_row(self.out, task, *rows)
        np.divide(out.reshape(to.shape), divisor, out=to, dtype=self.call.dtype, casting="unsafe")
        if not safe:
            self.call.by_row(self.largest, task, *rows)[...] = np.where(total == 0, 0, largest).reshape(by_head)
        self.call.by_row(self.log_total, task, *rows)[...] = np.log(total).reshape(by_head)
        return True


class Buffers:
    """Named buffers that one thread reuses."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.held: dict[str, Array] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Return an uninitialised array of this shape in the buffer of this name."""
        size = math.prod(shape)
        held = self.held.get(name)
        if held is None or held.size < size:
            held = self.held[name] = np.empty(size, dtype=dtype or self.dtype)
        return held[:size].reshape(shape)

    def ones(self, length: int) -> Array:
        """Return a vector of ones."""
        ones = self.held.get("ones")
        if ones is None or ones.size < length:
            ones = self.held["ones"] = np.ones(length, dtype=self.dtype)
        return ones[:length]


def score_bound(q: Array, k: Array, problem: Problem) -> float:
    """Return an upper bound of the magnitudes of scores, sinks and biases of a task; infinite or NaN where unknown.

    By the Cauchy–Schwarz inequality, |q · k| ≤ ‖q‖ ‖k‖. ``q`` is already scaled.
    """
    bound = math.sqrt(float(np.vecdot(q, q).max()) * float(np.vecdot(k, k).max(initial=0)))
    if not math.isfinite(bound):
        return bound
    if problem.softcap is not None:
        bound = min(bound, problem.softcap)
    if problem.sinks is not None:
        there = problem.sinks[problem.sinks != -math.inf]
        bound = max(bound, float(np.abs(there).max(initial=0)))
    if problem.bias is not None and math.isfinite(bound):  # a bias has no known bound: assume one above SAFE
        bound = max(bound, 1e9)
    return bound


def moderate(q: Array, k: Array, lse: Array, problem: Problem) -> bool:
    """Return whether the backward may compute the weights from the forward's row statistics.

    Two computations of a large score differ by rounding errors, and exp makes a difference of scores a factor of the
    weights. The rounding error of a large log-sum-exp has the same effect. ``q`` is already scaled.
    """
    scores = math.sqrt(float(np.vecdot(q, q).max(initial=0)) * float(np.vecdot(k, k).max(initial=0)))
    scores = scores if problem.softcap is None else min(scores, problem.softcap)
    return scores <= LARGE and float(np.abs(lse).max(initial=0, where=~np.isneginf(lse))) <= LARGE / 2


def finite(x: Array) -> bool:
    """Return whether all elements are finite, in most cases by one fast pass."""
    return math.isfinite(float(np.vdot(x, x))) or bool(np.isfinite(x).all())


def cap(scores: Array, problem: Problem) -> None:
    """Replace the scores by c · tanh(score / c)."""
    if problem.softcap is not None:
        scores /= problem.softcap
        np.tanh(scores, out=scores)
        scores *= problem.softcap


def wide(problem: Problem) -> np.dtype[Any]:
    return np.dtype("float64" if problem.dtype == "float64" else "float32")


def threads_for(problem: Problem) -> int:
    work = 2 * math.prod(problem.sizes.scores) * (problem.sizes.d_k + problem.sizes.d_v)
    return 1 if work < WORTHWHILE else thread_count()
