"""Attention, its backward and the backward of that as autograd nodes, in linear memory. Needs torch.

A node keeps its operands and computes the rest again. Its derivatives are those
of the whole formula: out and the row statistics, which a backward is handed,
count as the functions of the inputs that they are, so nothing goes back through
them. Of the statistics only the sum, the log-sum-exp, has derivatives: they
stand at the second of the two, and the largest score counts as a constant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyattn.backend import (
    Array,
    AttentionGrads,
    Kernel,
    Problem,
    RowStatistics,
    Tangents,
    attention_backward_vjp,
    attention_tangents,
)

__all__ = ["attention", "attention_backward"]

ARRAYS = ("bias", "table", "sinks", "mask", "q_offset", "key_lengths", "seed", "q_segments", "k_segments")
"""What a problem may have as tensors; the first three have gradients."""
OUT_AND_STATISTICS = (7, 8, 9)
"""Where they stand among the operands of :class:`_Second`."""


def attention(kernel: Kernel, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return a kernel's out and row statistics as one node."""
    bare, arrays = taken_apart(problem)
    out, *statistics = _Attention.apply(kernel, bare, q, k, v, *arrays)
    return out, RowStatistics(*statistics)


def attention_backward(
    kernel: Kernel, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
    statistics: RowStatistics, problem: Problem,
) -> AttentionGrads:  # fmt: skip
    """Return a kernel's gradients as one node."""
    bare, arrays = taken_apart(problem)
    return AttentionGrads(*_Backward.apply(kernel, bare, dout, dlse, out, *statistics, q, k, v, *arrays))


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``out, statistics = kernel.forward(q, k, v, problem)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kernel: Any, bare: Any, q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        out, statistics = kernel.forward(q, k, v, put_together(bare, arrays))
        return (out, *statistics)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel, ctx.bare, *operands = inputs
        ctx.set_materialize_grads(False)
        keep(ctx, *output, *operands)

    @staticmethod
    def backward(ctx: Any, dout: Any, _dlargest: Any, dlse: Any) -> Any:
        out, *others = ctx.saved_tensors
        dout, arrays = torch.zeros_like(out) if dout is None else dout, others[5:]
        dq, dk, dv, dbias, dsinks = _Backward.apply(ctx.kernel, ctx.bare, dout, dlse, out, *others)
        return None, None, dq, dk, dv, *spread(arrays, dbias, dsinks)

    @staticmethod
    def jvp(ctx: Any, _kernel: Any, _bare: Any, *moved: Any) -> Any:
        out, largest, log_total, q, k, v, *arrays = ctx.saved_tensors
        tangents, statistics = tangents_of(*moved), RowStatistics(largest, log_total)
        result = attention_tangents(q, k, v, tangents, out, statistics, put_together(ctx.bare, arrays))
        return result.out_dot.to(out.dtype), torch.zeros_like(largest), result.lse_dot.to(log_total.dtype)


class _Backward(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``kernel.backward(dout, dlse, q, k, v, out, statistics, problem)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        kernel: Any, bare: Any, dout: Any, dlse: Any, out: Any, largest: Any, log_total: Any, q: Any, k: Any, v: Any,
        *arrays: Any,
    ) -> Any:  # fmt: skip
        statistics = RowStatistics(largest, log_total)
        return tuple(kernel.backward(dout, dlse, q, k, v, out, statistics, put_together(bare, arrays)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel, ctx.bare, *operands = inputs
        ctx.set_materialize_grads(False)
        keep(ctx, *operands)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        ddout, ddlse, *grads = _Second.apply(ctx.kernel, ctx.bare, *cotangents, *ctx.saved_tensors)
        return None, None, ddout, ddlse, None, None, None, *grads

    @staticmethod
    def jvp(ctx: Any, _kernel: Any, _bare: Any, dout_dot: Any, dlse_dot: Any, *others: Any) -> Any:
        """∇L moves by its own derivative along the inputs, and by the backward of what dout and dlse move by."""
        dout, dlse, out, largest, log_total, q, k, v, *arrays = ctx.saved_tensors
        problem, statistics = put_together(ctx.bare, arrays), RowStatistics(largest, log_total)
        moved = tangents_of(*others[3:])  # those of out and the statistics are in the formula
        _, _, of = attention_backward_vjp(moved, dout, dlse, q, k, v, out, statistics, problem)
        if dout_dot is None and dlse_dot is None:
            return tuple(of)
        dout_dot = torch.zeros_like(dout) if dout_dot is None else dout_dot
        more = ctx.kernel.backward(dout_dot, dlse_dot, q, k, v, out, statistics, problem)
        return tuple(None if x is None else x + y for x, y in zip(of, more, strict=True))


class _Second(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """The gradients of dout, dlse, q, k, v and the problem's tensors from cotangents of the backward's results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kernel: Any, bare: Any, *operands: Any) -> Any:
        return second(bare, *operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel, ctx.bare, *operands = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        ctx.present = tuple(y is not None for y in output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Differentiate the formula as it is written, out and the statistics too: a third derivative is recorded."""
        operands = ctx.saved_tensors
        moving = [
            i for i, x in enumerate(operands) if x is not None and x.is_floating_point() and i not in OUT_AND_STATISTICS
        ]

        def formula(*given: Any) -> Any:
            now = list(operands)
            for i, x in zip(moving, given, strict=True):
                now[i] = x
            before, (q, k, v) = now[:7], now[10:13]
            out, statistics = attention(ctx.kernel, q, k, v, put_together(ctx.bare, now[13:]))
            return tuple(y for y in second(ctx.bare, *before, out, *statistics, *now[10:]) if y is not None)

        ys, pull = torch.func.vjp(formula, *(operands[i] for i in moving))
        given = (u for u, there in zip(cotangents, ctx.present, strict=True) if there)
        dys = tuple(torch.zeros_like(y) if u is None else u for u, y in zip(given, ys, strict=True))
        grads = dict(zip(moving, pull(dys), strict=True))
        return None, None, *(grads.get(i) for i in range(len(operands)))


def second(bare: Problem, *operands: Any) -> tuple[Array | None, ...]:
    """Return what :class:`_Second` does, each in the dtype of what it belongs to."""
    (dout, dlse, out, largest, log_total), (q, k, v), arrays = operands[5:10], operands[10:13], operands[13:]
    problem, statistics, cotangents = put_together(bare, arrays), RowStatistics(largest, log_total), operands[:5]
    ddout, ddlse, of = attention_backward_vjp(Tangents(*cotangents), dout, dlse, q, k, v, out, statistics, problem)
    grads = (of.q, of.k, of.v, *spread(arrays, of.bias, of.sinks))
    return ddout.to(dout.dtype), None if dlse is None else ddlse.to(dlse.dtype), *grads


def keep(ctx: Any, *tensors: Any) -> None:
    """Save tensors for either direction."""
    ctx.save_for_backward(*tensors)
    if torch.autograd.forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)


def taken_apart(problem: Problem) -> tuple[Problem, tuple[Array | None, ...]]:
    """Return a problem without its tensors, and these in the order of ARRAYS: torch has to see them."""
    given = (getattr(problem, name) for name in ARRAYS)
    arrays = tuple(x if isinstance(x, torch.Tensor) else None for x in given)
    absent: Any = {name: None for name, x in zip(ARRAYS, arrays, strict=True) if x is not None}
    return replace(problem, **absent), arrays


def put_together(bare: Problem, arrays: Any) -> Problem:
    """Return the problem again."""
    given: Any = {name: x for name, x in zip(ARRAYS, arrays, strict=True) if x is not None}
    return replace(bare, **given)


def tangents_of(q: Any, k: Any, v: Any, bias: Any, table: Any, sinks: Any, *_: Any) -> Tangents:
    """Return how the inputs move, from the tangents in the order of q, k, v and ARRAYS."""
    return Tangents(q, k, v, bias if table is None else table, sinks)


def spread(arrays: Any, dbias: Array | None, dsinks: Array | None) -> tuple[Array | None, ...]:
    """Return the gradients in the order of ARRAYS: that of the bias may be its table's."""
    bias, table, *others = arrays
    return None if bias is None else dbias, None if table is None else dbias, dsinks, *(None for _ in others[1:])
