"""Attention, its backward and the backward of its backward as autograd nodes, in linear memory. Imports torch.

A node saves its operands and computes all other arrays again. The derivatives of the
backward treat its arguments out and row statistics as functions of the inputs, so
the arguments themselves get no gradient. Only the sum of the row statistics, the
log-sum-exp, has derivatives: they are assigned to the second one, and the largest
score counts as a constant.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

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
    in_tiles_of,
)

__all__ = ["attention", "attention_backward"]


class Tensors(NamedTuple):
    """The arguments of a problem that may be tensors; the first three have gradients."""

    bias: Array | None = None
    table: Array | None = None
    sinks: Array | None = None
    mask: Array | None = None
    q_segments: Array | None = None
    k_segments: Array | None = None
    q_offset: Array | None = None
    key_lengths: Array | None = None
    seed: Array | None = None

    @classmethod
    def of(cls, problem: Problem) -> Tensors:
        """Return the tensors of a problem."""
        given = (getattr(problem, name) for name in cls._fields)
        return cls(*(x if isinstance(x, torch.Tensor) else None for x in given))

    def gradients(self, dbias: Array | None, dsinks: Array | None) -> Tensors:
        """Return the gradients by field: ``dbias`` belongs to the bias or to the table, whichever is present."""
        return Tensors(None if self.bias is None else dbias, None if self.table is None else dbias, dsinks)


class Operands(NamedTuple):
    """The operands of :class:`_Second`: cotangents of the gradients, then the operands of the backward."""

    q_bar: Array | None
    k_bar: Array | None
    v_bar: Array | None
    bias_bar: Array | None
    sinks_bar: Array | None
    dout: Array
    dlse: Array | None
    out: Array
    largest: Array
    log_total: Array
    q: Array
    k: Array
    v: Array
    bias: Array | None
    table: Array | None
    sinks: Array | None
    mask: Array | None
    q_segments: Array | None
    k_segments: Array | None
    q_offset: Array | None
    key_lengths: Array | None
    seed: Array | None

    @property
    def tensors(self) -> Tensors:
        """The tensors of the problem."""
        return Tensors(*(getattr(self, name) for name in Tensors._fields))


def attention(kernel: Kernel, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return out and row statistics of a kernel, as one node."""
    bare, arrays = taken_apart(in_tiles_of(kernel, problem))
    out, *statistics = _Attention.apply(kernel, bare, q, k, v, *arrays)
    return out, RowStatistics(*statistics)


def attention_backward(
    kernel: Kernel, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array,
    statistics: RowStatistics, problem: Problem,
) -> AttentionGrads:  # fmt: skip
    """Return the gradients of a kernel, as one node."""
    bare, arrays = taken_apart(in_tiles_of(kernel, problem))
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
        out, largest, log_total, q, k, v, *arrays = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        operands = (dout, dlse, out, largest, log_total, q, k, v, *arrays)
        dq, dk, dv, dbias, dsinks = _Backward.apply(ctx.kernel, ctx.bare, *operands)
        return None, None, dq, dk, dv, *Tensors(*arrays).gradients(dbias, dsinks)

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
    def jvp(
        ctx: Any, _kernel: Any, _bare: Any, dout_dot: Any, dlse_dot: Any, _out: Any, _largest: Any, _log_total: Any,
        *moved: Any,
    ) -> Any:  # fmt: skip
        """Add the derivative of the gradients along the inputs, and the backward of the tangents of dout and dlse."""
        dout, dlse, out, largest, log_total, q, k, v, *arrays = ctx.saved_tensors
        problem, statistics = put_together(ctx.bare, arrays), RowStatistics(largest, log_total)
        tangents = tangents_of(*moved)  # the formula includes those of out and the statistics
        _, _, of = attention_backward_vjp(tangents, dout, dlse, q, k, v, out, statistics, problem)
        if dout_dot is None and dlse_dot is None:
            return tuple(of)
        dout_dot = torch.zeros_like(dout) if dout_dot is None else dout_dot
        more = ctx.kernel.backward(dout_dot, dlse_dot, q, k, v, out, statistics, problem)
        return tuple(None if x is None else x + y for x, y in zip(of, more, strict=True))


class _Second(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """The gradients of dout, dlse, q, k, v and the problem's tensors, from cotangents of the backward's results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kernel: Any, bare: Any, *operands: Any) -> Any:
        return second(bare, Operands(*operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel, ctx.bare, *operands = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        ctx.present = tuple(y is not None for y in output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Differentiate the formula, including out and the statistics: autograd records third derivatives."""
        operands = Operands(*ctx.saved_tensors)
        floating = {name: x for name, x in operands._asdict().items() if x is not None and x.is_floating_point()}
        moving = [name for name in floating if name not in ("out", "largest", "log_total")]

        def formula(*given: Any) -> Any:
            now = operands._replace(**dict(zip(moving, given, strict=True)))
            out, statistics = attention(ctx.kernel, now.q, now.k, now.v, put_together(ctx.bare, now.tensors))
            now = now._replace(out=out, **statistics._asdict())
            return tuple(y for y in second(ctx.bare, now) if y is not None)

        ys, pull = torch.func.vjp(formula, *(floating[name] for name in moving))
        given = (u for u, there in zip(cotangents, ctx.present, strict=True) if there)
        dys = tuple(torch.zeros_like(y) if u is None else u for u, y in zip(given, ys, strict=True))
        grads = dict(zip(moving, pull(dys), strict=True))
        return None, None, *(grads.get(name) for name in Operands._fields)


def second(bare: Problem, x: Operands) -> tuple[Array | None, ...]:
    """Return the results of :class:`_Second`, each in the dtype of its operand."""
    problem, statistics = put_together(bare, x.tensors), RowStatistics(x.largest, x.log_total)
    cotangents = Tangents(x.q_bar, x.k_bar, x.v_bar, x.bias_bar, x.sinks_bar)
    ddout, ddlse, of = attention_backward_vjp(cotangents, x.dout, x.dlse, x.q, x.k, x.v, x.out, statistics, problem)
    grads = (of.q, of.k, of.v, *x.tensors.gradients(of.bias, of.sinks))
    return ddout.to(x.dout.dtype), None if x.dlse is None else ddlse.to(x.dlse.dtype), *grads


def keep(ctx: Any, *tensors: Any) -> None:
    """Save tensors for reverse mode, and for forward mode if it is active."""
    ctx.save_for_backward(*tensors)
    if torch.autograd.forward_ad._current_level >= 0:
        ctx.save_for_forward(*tensors)


def taken_apart(problem: Problem) -> tuple[Problem, Tensors]:
    """Return a problem without its tensors, and the tensors, which must be arguments of the node."""
    tensors = Tensors.of(problem)
    absent: Any = {name: None for name, x in tensors._asdict().items() if x is not None}
    return replace(problem, **absent), tensors


def put_together(bare: Problem, arrays: Any) -> Problem:
    """Reverse :func:`taken_apart`: return the problem with its tensors."""
    given: Any = {name: x for name, x in Tensors(*arrays)._asdict().items() if x is not None}
    return replace(bare, **given)


def tangents_of(q: Any, k: Any, v: Any, bias: Any, table: Any, sinks: Any, *_: Any) -> Tangents:
    """Return the tangents of the inputs, from those of q, k, v and :class:`Tensors`."""
    return Tangents(q, k, v, bias if table is None else table, sinks)
