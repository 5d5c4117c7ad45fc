"""Attention and its backward as operators of torch's own, which a compiled program calls without looking into them.

``torch.ops.polyattn.attention`` and ``torch.ops.polyattn.attention_backward``:
the tensors of a problem, its numbers, its structured mask and bias as text, and the name of a kernel. Needs torch.
"""

from __future__ import annotations

from typing import Any

import torch

from polyattn.backend import Array, AttentionGrads, Problem, RowStatistics, Sizes, dtype_name

from . import backend
from ._modes import FUSED, TILED
from ._structures import structure_of, text_of

__all__ = ["attention", "attention_backward"]

KERNELS = {kernel.name: kernel for kernel in (FUSED, TILED)}
ARRAYS = ("bias", "table", "sinks", "mask", "q_segments", "k_segments", "q_offset", "key_lengths", "seed")
INTEGERS = ARRAYS[-3:]
"""Each is a tensor or an integer, so an operator takes it twice."""
SCHEMA = """
    Tensor? bias, Tensor? table, Tensor? sinks, Tensor? mask, Tensor? q_segments, Tensor? k_segments, Tensor? q_offsets,
    Tensor? lengths, Tensor? seeds, SymInt? q_offset, SymInt? key_lengths, int? seed, bool causal, SymInt? left,
    SymInt? right, float scale, float? softcap, float dropout, str? masking, str? biasing,
    str kernel
""".strip()


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
    """Return a problem as the operators take it, but for the kernel."""
    given: dict[str, Any] = {name: getattr(problem, name) for name in ARRAYS}
    arrays = [x if isinstance(x, torch.Tensor) else None for x in given.values()]
    q_offset, key_lengths, seed = (None if isinstance(given[name], torch.Tensor) else given[name] for name in INTEGERS)
    if seed is not None and seed >= 2**63:
        seed -= 2**64  # the same bits, in what an operator takes for an integer
    left, right = problem.window
    return (
        *arrays, q_offset, key_lengths, seed, problem.causal, left, right, problem.scale, problem.softcap,
        problem.dropout, text_of(problem.mask), text_of(problem.bias),
    )  # fmt: skip


def problem_of(q: Array, k: Array, v: Array, *given: Any) -> Problem:
    """Return the problem that :func:`arguments` took apart."""
    bias, table, sinks, mask, q_segments, k_segments, *either = given[: len(ARRAYS) + len(INTEGERS)]
    causal, left, right, scale, softcap, dropout, masking, biasing = given[len(ARRAYS) + len(INTEGERS) :]
    q_offset, key_lengths, seed = (x if i is None else i for x, i in zip(either[:3], either[3:], strict=True))
    structured_mask, structured_bias = structure_of(masking), structure_of(biasing)
    return Problem(
        backend, sizes_of(q, k, v), dtype_name(q.dtype), backend.device_of(q), scale, causal, (left, right), softcap,
        dropout, q_offset, key_lengths, seed, mask if structured_mask is None else structured_mask,
        bias if structured_bias is None else structured_bias, sinks, q_segments, k_segments, table=table,
    )  # fmt: skip


def sizes_of(q: Array, k: Array, v: Array) -> Sizes:
    """Return the axis lengths of q, k and v, which have a head axis each."""
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


@torch.library.custom_op(  # type: ignore[untyped-decorator]
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


@_forward.register_fake  # type: ignore[untyped-decorator]
def _forward_outline(q: Array, k: Array, v: Array, *given: Any) -> Any:
    sizes = sizes_of(q, k, v)
    rows = (*sizes.batch, sizes.heads, sizes.n_q)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*rows, sizes.d_v)), q.new_empty(rows, dtype=dtype), q.new_empty(rows, dtype=dtype)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _backward_outline(
    dout: Array, dlse: Any, out: Array, largest: Array, log_total: Array, q: Array, k: Array, v: Array, *given: Any
) -> Any:
    bias, table, sinks = given[:3]
    like = (q, k, v, bias if table is None else table, sinks)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in like)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[: 3 + len(ARRAYS)])
    ctx.numbers = inputs[3 + len(ARRAYS) :]


def _pull(ctx: Any, dout: Any, dlargest: Any, dlog_total: Any) -> Any:
    """Only the sum of the two is differentiated: the gradient that either gets is that of the log-sum-exp."""
    out, largest, log_total, q, k, v, *arrays = ctx.saved_tensors
    dout, dlse = torch.zeros_like(out) if dout is None else dout, dlargest if dlog_total is None else dlog_total
    run = torch.ops.polyattn.attention_backward
    *grads, dbias, dsinks = run(dout, dlse, out, largest, log_total, q, k, v, *arrays, *ctx.numbers)
    floating = (None if x is None else dx for x, dx in zip(arrays[:3], (dbias, dbias, dsinks), strict=True))
    return *grads, *floating, *(None for _ in (*arrays[3:], *ctx.numbers))


_forward.register_autograd(_pull, setup_context=_setup)
