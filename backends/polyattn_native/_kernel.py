"""The native kernel of attention, for NumPy arrays and for torch's tensors on the CPU.

The library computes one problem a call, in linear memory and on threads of its own. Where it reports that a result
is not finite, or that an input is not, the generic kernel computes the problem, because it isolates excluded keys.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from polyattn.backend import (
    Array,
    AttentionGrads,
    Problem,
    RelativePositionBias,
    RowStatistics,
    TiledKernel,
    unbroadcast,
)

from ._arguments import Arguments, arguments, kept_axes, point_to, refusal, threads_of
from ._library import library, succeeded
from ._structures import Attention, AttentionBackward, Status
from ._views import NAMES, empty, empty_as, fill, pointers, readable, zeros

__all__ = ["NativeKernel"]

NUMBERS = (float, int)
TILED = TiledKernel()
WIDE = tuple(NAMES.values())


class NativeKernel:
    """Attention by the library of this package.

    ``opaque(*arrays)`` says whether their library traces, transforms or differentiates any of the arrays, so that they
    have no memory of their own.
    """

    name = "native"

    def __init__(self, opaque: Callable[..., bool] = lambda *arrays: False) -> None:
        self.opaque = opaque

    def supports(self, problem: Problem) -> str | None:
        """Support what the library can compute, if there is one for this machine."""
        reason = refusal(problem)
        if reason is not None:
            return reason
        if isinstance(problem.scale, NUMBERS) and (problem.softcap is None or isinstance(problem.softcap, NUMBERS)):
            return None
        return "a traced number is left to the generic kernel"

    def forward(self, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
        """Run the forward of the library; the generic kernel if it is in doubt, or if torch traces."""
        if self.opaque(q, k, v):
            return TILED.forward(q, k, v, problem)
        q_, k_, v_ = readable(q), readable(k), readable(v)
        rows, threads = problem.sizes.scores[:-1], threads_of(problem)
        out = empty_as(q_, (*rows, problem.sizes.d_v))
        wide = None if problem.dtype in WIDE else "float32"
        statistics = RowStatistics(empty(q_, rows, wide), empty(q_, rows, wide))
        given = arguments(q_, k_, v_, out, problem)  # holds the arrays to which the structure points
        status = _forward_at()(given.structure, *pointers(q_, k_, v_, out), *pointers(*statistics), threads)
        if not succeeded(status):
            return TILED.forward(q, k, v, problem)
        return out, statistics

    def backward(
        self, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
        problem: Problem,
    ) -> AttentionGrads:  # fmt: skip
        """Run the backward of the library; the generic kernel if it is in doubt, or if torch traces."""
        if not self.opaque(dout, dlse, q, k, v, out, *statistics):
            grads = _backward(dout, dlse, q, k, v, out, statistics, problem)
            if grads is not None:
                return grads
        return TILED.backward(dout, dlse, q, k, v, out, statistics, problem)


def _backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
    problem: Problem,
) -> AttentionGrads | None:  # fmt: skip
    """Return the gradients, or None if the library is in doubt."""
    q_, k_, v_, dout_, out_ = (readable(x) for x in (q, k, v, dout, out))
    given, kept = arguments(q_, k_, v_, out_, problem), kept_axes(problem.sizes.batch)
    call, wide = AttentionBackward(given.structure), NAMES[given.structure.wide_dtype]
    largest, log_total = (_rows(x, wide) for x in statistics)
    point_to(call.forward, q_, k_, v_, out_, largest, log_total)
    call.forward.threads = threads_of(problem)
    fill(call.dout, dout_, kept)
    if dlse is not None:
        dlse_ = _rows(dlse, wide)
        fill(call.dlse, dlse_, kept, ("head", "row"))
    whole = [empty_as(x, (*problem.sizes.batch, *x.shape[-3:])) for x in (q_, k_, v_)]
    for name, dx in zip(("dq", "dk", "dv"), whole, strict=True):
        fill(getattr(call, name), dx, kept)
    dbias = _bias_gradient(call, given, q_, problem, kept, wide)
    dsinks = None if problem.sinks is None else np.empty((*problem.sizes.batch, problem.sizes.heads))
    call.dsinks = None if dsinks is None else dsinks.ctypes.data
    if not succeeded(_backward_function()(ctypes.byref(call))):
        return None
    dq, dk, dv = (unbroadcast(problem.xp, dx, x.shape) for dx, x in zip(whole, (q, k, v), strict=True))
    return AttentionGrads(dq, dk, dv, _of_bias(dbias, problem), _of_sinks(dsinks, problem))


def _bias_gradient(
    call: AttentionBackward, given: Arguments, q: Array, problem: Problem, kept: tuple[int, ...], wide: str
) -> Array | None:  # fmt: skip
    """Allocate and describe the gradient of the bias, or of each distance."""
    if given.distances is not None:
        heads, distances = given.distances.shape[-2:]
        dbias = zeros(q, (*problem.sizes.batch, heads, distances), wide)
        fill(call.ddistances, dbias, kept, ("head", "row"))
        return dbias
    bias: Any = problem.bias_array
    if bias is None:
        return None
    dbias = zeros(q, tuple(bias.shape), wide)
    fill(call.dbias, dbias, kept)
    return dbias


def _of_bias(dbias: Array | None, problem: Problem) -> Array | None:
    """Return the gradient of the bias, or of its table, in its dtype."""
    bias: Any = problem.bias
    if dbias is None:
        return None
    if isinstance(bias, RelativePositionBias):
        return bias.table_gradient(dbias, problem)
    return problem.xp.astype(dbias, bias.dtype, copy=False)


def _of_sinks(dsinks: Any, problem: Problem) -> Array | None:
    """Sum the gradient of the sinks over the batch."""
    sinks: Any = problem.sinks
    if dsinks is None:
        return None
    total = dsinks.reshape(-1, dsinks.shape[-1]).sum(axis=0)
    return problem.xp.astype(problem.backend.asarray(total), sinks.dtype)


def _rows(x: Array, wide: str) -> Array:
    """Return numbers of rows as a contiguous array of the wide dtype."""
    x = readable(x)
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x, dtype=wide)
    import torch

    return x.to(getattr(torch, wide)).contiguous()


@functools.cache
def _forward_at() -> Callable[..., int]:
    functions: Any = library()
    function = functions.polyattn_attention_forward_at
    function.restype, function.argtypes = Status, (ctypes.POINTER(Attention), *[ctypes.c_void_p] * 6, ctypes.c_int32)
    return function  # type: ignore[no-any-return]  # a function of the library is Any


@functools.cache
def _backward_function() -> Callable[[Any], int]:
    functions: Any = library()
    function = functions.polyattn_attention_backward
    function.restype = Status
    return function  # type: ignore[no-any-return]  # as above
