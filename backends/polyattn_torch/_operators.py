"""Attention and its backward as custom operators of torch, so that torch.compile does not trace the kernels.

``torch.ops.polyattn.attention`` and ``torch.ops.polyattn.attention_backward`` take the tensors of a problem, its
numbers, its structured mask and bias as text, and the name of a kernel. This module imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics, Sizes, dtype_name

from . import backend
from ._modes import FUSED, NATIVE, TILED
from ._nodes import Tensors
from ._structures import structure_of, text_of

__all__ = ["attention", "attention_backward"]

KERNELS = {kernel.name: kernel for kernel in (NATIVE, FUSED, TILED)}
SCHEMA = """
    Tensor? bias, Tensor? table, Tensor? sinks, Tensor? mask, Tensor? q_segments, Tensor? k_segments, Tensor? q_offsets,
    Tensor? lengths, Tensor? seeds, SymInt? q_offset, SymInt? key_lengths, int? seed, bool causal, SymInt? left,
    SymInt? right, float scale, float? softcap, float dropout, str? masking, str? biasing,
    str kernel
""".strip()


class Numbers(NamedTuple):
    """The arguments of an operator that are not tensors; an integer is None if it is given as a tensor or absent."""

    q_offset: int | None
    key_lengths: int | None
    seed: int | None
    causal: bool
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    dropout: float
    masking: str | None
    biasing: str | None


def attention(kernel: str, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Call the operator for out and the row statistics."""
    out, *statistics = torch.ops.polyattn.attention(q, k, v, *arguments(problem), kernel)
    return out, RowStatistics(*statistics)


def attention_backward(
    kernel: str, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
    statistics: RowStatistics, problem: Problem,
) -> AttentionGrads:  # fmt: skip
    """Call the operator for the gradients of q, k, v, bias and sinks."""
    run = torch.ops.polyattn.attention_backward
    dq, dk, dv, dbias, dsinks = run(dout, dlse, out, *statistics, q, k, v, *arguments(problem), kernel)
    dbias, dsinks = (None if x is None else dx for x, dx in ((problem.bias_array, dbias), (problem.sinks, dsinks)))
    return AttentionGrads(dq, dk, dv, dbias, dsinks)


def arguments(problem: Problem) -> tuple[Any, ...]:
    """Return a problem as arguments of the operators, without the kernel."""
    given = (problem.q_offset, problem.key_lengths, problem.seed)
    q_offset, key_lengths, seed = (None if isinstance(x, torch.Tensor) else x for x in given)
    if seed is not None and seed >= 2**63:
        seed -= 2**64  # the same bits as a signed 64-bit integer, which the operator requires
    left, right = problem.window
    numbers = Numbers(
        q_offset, key_lengths, seed, problem.causal, left, right, problem.scale, problem.softcap, problem.dropout,
        text_of(problem.mask), text_of(problem.bias),
    )  # fmt: skip
    return *Tensors.of(problem), *numbers


def problem_of(q: Array, k: Array, v: Array, *given: Any) -> Problem:
    """Reverse :func:`arguments`: return the problem."""
    tensors, numbers = by_name(given)
    mask, bias = structure_of(numbers.masking), structure_of(numbers.biasing)
    either = {
        name: getattr(tensors, name) if (number := getattr(numbers, name)) is None else number
        for name in ("q_offset", "key_lengths", "seed")
    }
    return Problem(
        backend, sizes_of(q, k, v), dtype_name(q.dtype), backend.device_of(q), numbers.scale, numbers.causal,
        (numbers.left, numbers.right), numbers.softcap, numbers.dropout, **either,
        mask=tensors.mask if mask is None else mask, bias=tensors.bias if bias is None else bias, sinks=tensors.sinks,
        q_segments=tensors.q_segments, k_segments=tensors.k_segments, table=tensors.table,
    )  # fmt: skip


def by_name(given: Sequence[Any]) -> tuple[Tensors, Numbers]:
    """Return the arguments of an operator by name."""
    count = len(Tensors._fields)
    return Tensors(*given[:count]), Numbers(*given[count:])


def sizes_of(q: Array, k: Array, v: Array) -> Sizes:
    """Return the sizes of a problem from q, k and v, which must have a head axis."""
    batch = tuple(torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v))))
    return Sizes(batch, q.shape[-3], k.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])


@torch.library.custom_op(  # type: ignore[untyped-decorator]  # torch is Any to the type checker
    "polyattn::attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {SCHEMA}) -> (Tensor out, Tensor largest, Tensor log_total)",
)
def _forward(q: Array, k: Array, v: Array, *given: Any) -> Any:
    *arguments, kernel = given
    with backend.scope():
        out, statistics = KERNELS[kernel].forward(q, k, v, problem_of(q, k, v, *arguments))
    return tuple(x.contiguous() for x in (out, *statistics))


@torch.library.custom_op(  # type: ignore[untyped-decorator]  # as above
    "polyattn::attention_backward", mutates_args=(),
    schema="(Tensor dout, Tensor? dlse, Tensor out, Tensor largest, Tensor log_total, Tensor q, Tensor k, Tensor v, "
    f"{SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
)  # fmt: skip
def _backward(
    dout: Array, dlse: Any, out: Array, largest: Array, log_total: Array, q: Array, k: Array, v: Array, *given: Any
) -> Any:
    *arguments, kernel = given
    with backend.scope():
        problem, statistics = problem_of(q, k, v, *arguments), RowStatistics(largest, log_total)
        grads = KERNELS[kernel].backward(dout, dlse, q, k, v, out, statistics, problem)
    return tuple(q.new_empty(0) if dx is None else dx.contiguous() for dx in grads)


@_forward.register_fake  # type: ignore[untyped-decorator]  # as above
def _forward_outline(q: Array, k: Array, v: Array, *given: Any) -> Any:
    sizes = sizes_of(q, k, v)
    rows = (*sizes.batch, sizes.heads, sizes.n_q)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*rows, sizes.d_v)), q.new_empty(rows, dtype=dtype), q.new_empty(rows, dtype=dtype)


@_backward.register_fake  # type: ignore[untyped-decorator]  # as above
def _backward_outline(
    dout: Array, dlse: Any, out: Array, largest: Array, log_total: Array, q: Array, k: Array, v: Array, *given: Any
) -> Any:
    *arguments, _ = given
    tensors, _ = by_name(arguments)
    like = (q, k, v, tensors.bias if tensors.table is None else tensors.table, tensors.sinks)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in like)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    q, k, v, *arguments, ctx.kernel = inputs
    tensors, ctx.numbers = by_name(arguments)
    ctx.save_for_backward(*output, q, k, v, *tensors)


def _pull(ctx: Any, dout: Any, dlargest: Any, dlog_total: Any) -> Any:
    """Call the backward; the gradient of either row statistic is that of their sum, the log-sum-exp."""
    out, largest, log_total, q, k, v, *arrays = ctx.saved_tensors
    dout, dlse = torch.zeros_like(out) if dout is None else dout, dlargest if dlog_total is None else dlog_total
    run = torch.ops.polyattn.attention_backward
    *grads, dbias, dsinks = run(dout, dlse, out, largest, log_total, q, k, v, *arrays, *ctx.numbers, ctx.kernel)
    tensors = Tensors(*arrays)
    of_tensors = tensors.gradients(dbias, None if tensors.sinks is None else dsinks)
    return *grads, *of_tensors, *(None for _ in (*ctx.numbers, ctx.kernel))


_forward.register_autograd(_pull, setup_context=_setup)
