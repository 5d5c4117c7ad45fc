"""The graphs of attention: one task for each cell, and trees of tasks that merge or sum the results of cells."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import dask
import dask.array as da
import numpy as np
from dask._task_spec import List, Task, TaskRef
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from ...backend import dtype_name
from ...kernels import Array, Problem, RowStatistics, StructuredBias
from . import _tasks
from ._cells import Part, has_pairs, part_of
from ._grid import Chunks, Grid, Index, grid_of

__all__ = ["Call", "backward_arrays", "call_of", "forward_arrays"]

Key = tuple[Hashable, ...]
Tasks = dict[Key, Task]


class Call(NamedTuple):
    """A problem of Dask arrays: its static part, its arrays in the chunks of its grid, and the grid."""

    problem: Problem
    arrays: dict[str, Array]
    grid: Grid

    def refs(self, names: Sequence[str], row: Index, j: int) -> dict[str, TaskRef]:
        """Return the chunks that a cell needs, of those of these arrays that the call has."""
        return {
            name: TaskRef((x.name, *self.grid.block(name, x.shape, row, j)))
            for name, x in self.arrays.items()
            if name in names
        }

    def parts(self, row: Index) -> dict[int, Part]:
        """Return the parts of a chunk of rows that may have pairs, by the number of their chunk of keys."""
        parts = {j: part_of(self.problem, self.grid.cell(row, j)) for j in range(len(self.grid.keys))}
        return {j: part for j, part in parts.items() if has_pairs(part)}


def call_of(problem: Problem, arrays: Mapping[str, Array]) -> Call:
    """Return the call of a problem. Arrays are rechunked to its grid, if need be: masks, and features in one chunk."""
    given: dict[str, Array | None] = {
        "mask": problem.mask, "bias": problem.bias_array, "sinks": problem.sinks, "q_segments": problem.q_segments,
        "k_segments": problem.k_segments, "q_offset": problem.q_offset, "key_lengths": problem.key_lengths,
        "seed": problem.seed,
    }  # fmt: skip
    if problem.table is not None:
        given["table"] = given.pop("bias")
    named = {**arrays, **{name: x for name, x in given.items() if isinstance(x, da.Array)}}
    static: dict[str, Any] = {name: None for name in given if name in named} | {"table": None}
    if isinstance(problem.bias, StructuredBias):
        static["bias"] = problem.bias
    grid = grid_of(problem.sizes, *(arrays[name] for name in "qkv"))
    fitted = {name: x.rechunk(grid.chunks(name, x.shape)) for name, x in named.items()}
    return Call(replace(problem, backend=None, device=None, **static), fitted, grid)


# ---- forward -------------------------------------------------------------------------------------------------------

INPUTS = ("q", "k", "v", "mask", "bias", "table", "q_segments", "k_segments", "q_offset", "key_lengths", "seed")


def forward_arrays(call: Call) -> tuple[Array, RowStatistics]:
    """Return the result and the row statistics, in the chunks of the queries."""
    token = tokenize(call.problem, *(x.name for x in call.arrays.values()))
    part_name, rows_name = f"attention-part-{token}", f"attention-rows-{token}"
    tasks: Tasks = {}
    for row in call.grid.rows():
        keys: list[Key] = []
        for j, part in call.parts(row).items():
            keys.append((part_name, *row, j))
            tasks[keys[-1]] = Task(keys[-1], _tasks.forward_part, part, **call.refs(INPUTS, row, j))
        top, any_part = (rows_name, *row), part_of(call.problem, call.grid.cell(row, 0))
        few = reduced(tasks, keys, f"attention-merge-{token}", _tasks.merged, any_part)
        more = call.refs(("sinks",) if keys else ("q", "sinks"), row, 0)
        tasks[top] = Task(top, _tasks.finished, few, any_part, call.problem.dtype, **more)
    sizes, q = call.problem.sizes, call.arrays["q"]
    layer = graph_of(rows_name, tasks, call.arrays.values())
    chunks = (*call.grid.batch, call.grid.heads, call.grid.queries)
    rows = Results(layer, rows_name, chunks, q._meta)
    wide = np.float64 if call.problem.dtype == "float64" else np.float32
    out = rows.array("out", token, q.dtype, (sizes.d_v,))
    return out, RowStatistics(*(rows.array(f"statistics.{name}", token, wide) for name in RowStatistics._fields))


# ---- backward ------------------------------------------------------------------------------------------------------

GIVEN = ("dout", "dlse", "out", "largest", "log_total")


def backward_arrays(call: Call) -> dict[str, Array]:
    """Return the gradients by name, each in the chunks of its argument."""
    token = tokenize(call.problem, *(x.name for x in call.arrays.values()))
    names = [name for name in ("q", "k", "v", "bias", "table", "sinks") if name in call.arrays]
    sums: dict[str, dict[Index, list[Key]]] = {name: defaultdict(list) for name in names}
    tasks: Tasks = {}
    for row in call.grid.rows():
        parts = call.parts(row)
        whole = len(parts) == 1 and "sinks" not in names
        for j, part in parts.items():
            pair = (f"attention-gradients-{token}", *row, j)
            tasks[pair] = Task(pair, _tasks.gradients, part, whole, **call.refs((*INPUTS, *GIVEN), row, j))
            for name in names:
                if name != "sinks":
                    field = "bias" if name == "table" else name
                    one = (f"attention-d{name}-part-{token}", *row, j)
                    tasks[one] = Task(one, _field, TaskRef(pair), field)
                    sums[name][call.grid.block(name, call.arrays[name].shape, row, j)].append(one)
        if "sinks" in names:
            one = (f"attention-dsinks-part-{token}", *row)
            any_part = part_of(call.problem, call.grid.cell(row, 0))
            tasks[one] = Task(one, _tasks.sinks_gradient, any_part, **call.refs(("sinks", *GIVEN), row, 0))
            sums["sinks"][(row[-2],)].append(one)
    tops = {name: sums_of(tasks, f"attention-d{name}-{token}", call.arrays[name], sums[name]) for name in names}
    graph = graph_of(f"attention-gradients-{token}", tasks, call.arrays.values())
    return {
        name: gradient_array(graph, f"attention-gradients-{token}", call.arrays[name], top)
        for name, top in tops.items()
    }


def sums_of(tasks: Tasks, name: str, x: Array, sums: Mapping[Index, list[Key]]) -> Tasks:
    """Return the tasks that sum the gradient of each chunk of an array; zeros for a chunk that no cell needs."""
    tops: Tasks = {}
    for index in np.ndindex(*x.numblocks):
        top, keys = (name, *index), sums.get(index)
        if keys:
            few = reduced(tasks, keys, f"{name}-sum", _tasks.total)
            tops[top] = Task(top, _tasks.total, few, dtype_name(x.dtype))
        else:
            tops[top] = Task(top, _tasks.zeros_of, TaskRef((x.name, *index)))
    return tops


def gradient_array(graph: HighLevelGraph, below: str, x: Array, tops: Tasks) -> Array:
    """Return the gradient of an array, whose chunks are the results of ``tops``."""
    (name, *_), *_ = tops
    layers = {**graph.layers, name: tops}
    dependencies = {**graph.dependencies, name: {below, x.name}}
    return da.Array(HighLevelGraph(layers, dependencies), name, x.chunks, dtype=x.dtype, meta=x._meta)


# ---- trees and arrays ----------------------------------------------------------------------------------------------


def reduced(tasks: Tasks, keys: Sequence[Key], name: str, function: Callable[..., Any], *more: Any) -> List:
    """Add a tree of tasks over ``keys``, and return at most ``split_every`` of them, as dask.array's reductions do."""
    every = dask.config.get("split_every", 4)
    level = 0
    while len(keys) > every:
        above: list[Key] = []
        for start in range(0, len(keys), every):
            group = keys[start : start + every]
            above.append((name, level, *group[0]))
            tasks[above[-1]] = Task(above[-1], function, List(*map(TaskRef, group)), *more)
        keys, level = above, level + 1
    return List(*map(TaskRef, keys))


def graph_of(name: str, tasks: Tasks, arrays: Any) -> HighLevelGraph:
    """Return the graph with a layer of tasks on the graphs of arrays."""
    return HighLevelGraph.from_collections(name, tasks, dependencies=tuple(arrays))


class Results(NamedTuple):
    """The results of rows, from which each array takes a field."""

    graph: HighLevelGraph
    name: str
    chunks: Chunks
    meta: Any

    def array(self, field: str, token: str, dtype: Any, *features: tuple[int, ...]) -> Array:
        """Return the array of a field; ``features`` are the chunks of its axes after those of the rows."""
        name = f"attention-{field.rpartition('.')[2].replace('_', '-')}-{token}"
        keys = {index: (name, *index, *(0 for _ in features)) for index in np.ndindex(*map(len, self.chunks))}
        tasks = {key: Task(key, _field, TaskRef((self.name, *index)), field) for index, key in keys.items()}
        graph = HighLevelGraph({**self.graph.layers, name: tasks}, {**self.graph.dependencies, name: {self.name}})
        return da.Array(graph, name, (*self.chunks, *features), dtype=dtype, meta=self.meta)


def _field(record: Any, name: str) -> Any:
    return operator.attrgetter(name)(record)
