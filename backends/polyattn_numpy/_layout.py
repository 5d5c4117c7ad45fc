"""The layout of a call for the blocked kernel: tasks for threads, tiles of a task, excluded pairs of a tile."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from polyattn.backend import AlibiBias, Array, Problem

from ._keep import keep_mask

__all__ = ["Call", "Task", "dense", "folded"]

ROWS, COLUMNS = 256, 512  # of a tile
SCORES = 2**18  # per tile, over all its heads: 1 MiB in float32, which fits the cache of one core
WORTHWHILE = 2**24  # floating-point operations below which a second thread is slower


class Task(NamedTuple):
    """A range of heads of one batch entry, and a range of their queries."""

    entry: tuple[int, ...]
    kv_heads: slice
    start: int
    stop: int
    piece: int
    """The number of the range of queries: 0 for the first queries."""


@dataclass(frozen=True)
class Call:
    """A problem with its layout. The rows of a key head are ordered by query, then by query head."""

    problem: Problem
    threads: int
    dtype: Any
    """The dtype of scores and sums: float32 or float64."""
    patterns: dict[tuple[int, int, int], Array] = field(default_factory=dict)
    """The pairs of a tile that causality and window exclude, by the position and size of the tile."""

    @functools.cached_property
    def plain(self) -> bool:
        """Whether each score is just the product: no mask, bias, softcap, window or segments."""
        problem = self.problem
        arrays = (problem.mask, problem.bias, problem.q_segments)
        return problem.reach == (None, None) and problem.softcap is None and all(x is None for x in arrays)

    @functools.cached_property
    def groups(self) -> int:
        """The number of query heads for each key head."""
        return self.problem.sizes.heads // self.problem.sizes.kv_heads

    @functools.cached_property
    def rows(self) -> int:
        """The number of queries of a tile."""
        return min(self.problem.sizes.n_q, max(1, ROWS // self.groups))

    def tasks(self) -> list[Task]:
        """Split the problem into a few tasks for each thread, late queries first: causality gives them more keys."""
        sizes, rows = self.problem.sizes, self.rows
        tile = rows * self.groups * min(sizes.n_k, COLUMNS)
        entries = math.prod(sizes.batch)
        together = min(max(1, SCORES // tile), -(-sizes.kv_heads * entries // (4 * self.threads)), sizes.kv_heads)
        there = entries * -(-sizes.kv_heads // together)
        pieces = 1 if there >= 2 * self.threads else -(-2 * self.threads // there)
        length = -(-sizes.n_q // (rows * pieces)) * rows
        starts = list(enumerate(range(0, sizes.n_q, length)))
        return [
            Task(entry, slice(head, min(head + together, sizes.kv_heads)), start, min(start + length, sizes.n_q), piece)
            for piece, start in reversed(starts)
            for entry in np.ndindex(*sizes.batch)
            for head in range(0, sizes.kv_heads, together)
        ]

    def heads(self, task: Task) -> slice:
        """Return the query heads of a task."""
        return slice(task.kv_heads.start * self.groups, task.kv_heads.stop * self.groups)

    def by_row(self, x: Array, task: Task, start: int, stop: int) -> Array:
        """View an array by query head and query as ``(kv heads, queries, groups, …)``."""
        x = x[task.entry][self.heads(task), start:stop]  # (heads, queries, …)
        return x.reshape(-1, self.groups, *x.shape[1:]).swapaxes(1, 2)

    def keys(self, task: Task, start: int, stop: int) -> tuple[int, int]:
        """Return the range of keys that causality, window and lengths allow for any query in ``[start, stop)``."""
        problem = self.problem
        (left, right), first, last = problem.reach, 0, self._length(task)
        if right is not None:
            last = min(last, self._offset(task) + stop + right)
        if left is not None:
            first = max(first, self._offset(task) + start - left)
        return first, max(first, last)

    def tiles(self, task: Task) -> Iterator[tuple[int, int]]:
        """Yield the key tiles of a task as ranges."""
        first, last = self.keys(task, task.start, task.stop)
        for start in range(first, last, COLUMNS):
            yield start, min(start + COLUMNS, last)

    def excluded(self, task: Task, rows: tuple[int, int], columns: tuple[int, int]) -> Array | None:
        """Return the excluded pairs of a tile, broadcastable to (kv heads, queries, groups, keys)."""
        problem = self.problem
        conditions = [self._out_of_reach(task, rows, columns)]
        if problem.mask is not None:
            conditions.append(np.logical_not(self.pairs(problem.mask, task, rows, columns)))
        if problem.q_segments is not None and problem.k_segments is not None:
            q_ids, k_ids = (
                np.broadcast_to(ids, (*problem.sizes.batch, ids.shape[-1]))[task.entry][slice(*span)]
                for ids, span in ((problem.q_segments, rows), (problem.k_segments, columns))
            )
            conditions.append((q_ids[:, None] != k_ids)[:, None, :])  # (queries, 1, keys)
        there = [condition for condition in conditions if condition is not None]
        return functools.reduce(np.logical_or, there) if there else None

    def kept(self, task: Task, rows: tuple[int, int], columns: tuple[int, int], take: Any) -> Array:
        """Return the dropout mask of a tile, ``(kv heads, rows, keys)``, True where a weight is kept."""
        problem, heads = self.problem, self.heads(task)
        entry = int(np.ravel_multi_index(task.entry, problem.sizes.batch)) if task.entry else 0
        head = (entry * problem.sizes.heads + np.arange(heads.start, heads.stop)).reshape(-1, 1, self.groups)
        row = head * problem.sizes.n_q + np.arange(*rows)[:, None]  # (kv heads, queries, groups)
        seed = 0 if problem.seed is None else int(problem.seed)
        keep = keep_mask(row.astype(np.uint32), *columns, seed, problem.dropout, take)
        return keep.reshape(row.shape[0], -1, keep.shape[-1])

    def bias(self, task: Task, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """Return a tile of the bias, broadcastable to (kv heads, queries, groups, keys)."""
        bias = self.problem.bias
        if not isinstance(bias, AlibiBias):
            return self.pairs(bias, task, rows, columns)
        slopes = np.asarray(bias.slopes[self.heads(task)], dtype=self.dtype)
        away = np.abs(np.arange(*columns) - np.arange(*rows)[:, None, None] - self._offset(task)).astype(self.dtype)
        return away * -slopes.reshape(-1, 1, self.groups, 1)

    def pairs(self, x: Array, task: Task, rows: tuple[int, int], columns: tuple[int, int]) -> Array:
        """View a tile of a mask or bias as (kv heads, queries, groups, keys); broadcast axes keep length 1."""
        x = x.reshape((1,) * (len(self.problem.sizes.scores) - x.ndim) + x.shape)
        x = x[tuple(0 if n == 1 else i for i, n in zip(task.entry, x.shape, strict=False))]  # (H, n_q, n_k)
        spans = (self.heads(task), slice(*rows), slice(*columns))
        x = x[tuple(slice(None) if n == 1 else span for n, span in zip(x.shape, spans, strict=True))]
        x = x[:, None] if x.shape[0] == 1 else x.reshape(-1, self.groups, *x.shape[1:])
        return x.swapaxes(1, 2)

    def _out_of_reach(self, task: Task, rows: tuple[int, int], columns: tuple[int, int]) -> Array | None:
        left, right = self.problem.reach
        ahead = columns[0] - rows[0] - self._offset(task)  # position of the first key minus that of the first query
        n_q, n_k = rows[1] - rows[0], columns[1] - columns[0]
        if (right is None or ahead + n_k - 1 <= right) and (left is None or ahead - n_q + 1 >= -left):
            return None
        pattern = self.patterns.get((ahead, n_q, n_k))
        if pattern is None:
            steps = np.arange(ahead, ahead + n_k) - np.arange(n_q)[:, None, None]  # (queries, 1, keys)
            pattern = np.zeros(steps.shape, dtype=np.bool_)
            if right is not None:
                pattern |= steps > right
            if left is not None:
                pattern |= steps < -left
            self.patterns[ahead, n_q, n_k] = pattern
        return pattern

    def _offset(self, task: Task) -> int:
        return _of_entry(self.problem.q_offset, self.problem, task)

    def _length(self, task: Task) -> int:
        lengths, n_k = self.problem.key_lengths, self.problem.sizes.n_k
        return n_k if lengths is None else min(n_k, max(0, _of_entry(lengths, self.problem, task)))


def folded(
    problem: Problem, qkv: Sequence[Array], rest: Sequence[Array | None] = ()
) -> tuple[Problem, list[Array], list[Array | None]]:
    """Merge the batch axes into the head axis, if no argument differs between batch entries.

    Tiles then span the heads of many small entries. Otherwise q, k and v are broadcast to all batch axes, which the
    arrays of ``rest`` (dout and results of the forward) already have.
    """
    sizes, pairs = problem.sizes, [x for x in (problem.mask, problem.bias_array) if x is not None]
    alike = problem.sinks is None and problem.q_segments is None and all(math.prod(x.shape[:-2]) == 1 for x in pairs)
    alike = alike and all(isinstance(x, int | None) for x in (problem.q_offset, problem.key_lengths))
    packed = all(x is None or x.flags.c_contiguous for x in (*qkv, *rest))
    if not (alike and packed and all(x.shape[:-3] == sizes.batch for x in qkv)):
        return problem, [np.broadcast_to(x, (*sizes.batch, *x.shape[-3:])) for x in qkv], list(rest)
    flat = [None if x is None else x.reshape(-1, *x.shape[len(sizes.batch) + 1 :]) for x in (*qkv, *rest)]
    mask, bias = (None if x is None else x.reshape(x.shape[-2:]) for x in (problem.mask, problem.bias_array))
    entries = math.prod(sizes.batch)
    if isinstance(problem.bias, AlibiBias):
        bias = AlibiBias(problem.bias.slopes * entries)
    sizes = sizes._replace(batch=(), heads=entries * sizes.heads, kv_heads=entries * sizes.kv_heads)
    return replace(problem, sizes=sizes, mask=mask, bias=bias), flat[: len(qkv)], flat[len(qkv) :]


def dense(x: Array, dtype: Any) -> Array:
    """Return matrices in a layout that the BLAS can read: ``x`` itself if possible, else a copy."""
    step, *_ = reversed(x.strides)
    readable = x.dtype == dtype and step == x.itemsize and x.strides[-2] >= x.shape[-1] * step
    return x if readable and x.strides[-2] % step == 0 and x.flags.aligned else np.ascontiguousarray(x, dtype=dtype)


def _of_entry(value: int | Array, problem: Problem, task: Task) -> int:
    return value if isinstance(value, int) else int(np.broadcast_to(value, problem.sizes.batch)[task.entry])
