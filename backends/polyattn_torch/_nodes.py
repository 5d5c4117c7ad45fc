"""Attention, its backward and the backward of that as autograd nodes, in linear memory. Needs torch.

A node keeps its operands and computes the rest again. Its derivatives are those
of the whole formula: out and lse, which a backward is handed, count as the
functions of the inputs that they are, so nothing goes back through them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyattn.backend import Array, Kernel, Problem, Tangents, attention_backward_vjp, attention_tangents

__all__ = ["attention", "attention_backward"]

ARRAYS = ("bias", "table", "sinks", "mask", "q_offset", "key_lengths", "seed", "q_segments", "k_segments")
"""What a problem may have as tensors; the first three have gradients."""
OUT_AND_LSE = (7, 8)
"""Where they stand among the operands of :class:`_Second`."""
Gradients = tuple[Array, Array, Array, Array | None, Array | None]


def attention(kernel: Kernel, q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, Array]:
    """Return a kernel's out and lse as one node."""
    bare, arrays = taken_apart(problem)
    out, lse = _Attention.apply(kernel, bare, q, k, v, *arrays)
    return out, lse


def attention_backward(
    kernel: Kernel, dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, lse: Array,
    problem: Problem,
) -> Gradients:  # fmt: skip
    """Return a kernel's gradients as one node."""
    bare, arrays = taken_apart(problem)
    grads: Gradients = _Backward.apply(kernel, bare, dout, dlse, out, lse, q, k, v, *arrays)
    return grads


class _Attention(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``out, lse = kernel.forward(q, k, v, problem)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(kernel: Any, bare: Any, q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        return kernel.forward(q, k, v, put_together(bare, arrays))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel, ctx.bare, *operands = inputs
        ctx.set_materialize_grads(False)
        keep(ctx, *output, *operands)

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        out, lse, q, k, v, *arrays = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dbias, dsinks = _Backward.apply(ctx.kernel, ctx.bare, dout, dlse, out, lse, q, k, v, *arrays)
        return None, None, dq, dk, dv, *spread(arrays, dbias, dsinks)

    @staticmethod
    def jvp(ctx: Any, _kernel: Any, _bare: Any, *moved: Any) -> Any:
        out, lse, q, k, v, *arrays = ctx.saved_tensors
        tangents = tangents_of(*moved)
        result = attention_tangents(q, k, v, tangents, out, lse, put_together(ctx.bare, arrays))
        return result.out_dot.to(out.dtype), result.lse_dot.to(lse.dtype)


class _Backward(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``kernel.backward(dout, dlse, q, k, v, out, lse, problem)``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        kernel: Any, bare: Any, dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, *arrays: Any
    ) -> Any:
        return kernel.backward(dout, dlse, q, k, v, out, lse, put_together(bare, arrays))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel, ctx.bare, *operands = inputs
        ctx.set_materialize_grads(False)
        keep(ctx, *operands)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        dout, dlse, out, lse, *operands = ctx.saved_tensors
        ddout, ddlse, *grads = _Second.apply(ctx.kernel, ctx.bare, *cotangents, dout, dlse, out, lse, *operands)
        return None, None, ddout, ddlse, None, None, *grads

    @staticmethod
    def jvp(ctx: Any, _kernel: Any, _bare: Any, dout_dot: Any, dlse_dot: Any, _out: Any, _lse: Any, *moved: Any) -> Any:
        """∇L moves by its own derivative along the inputs, and by the backward of what dout and dlse move by."""
        dout, dlse, out, lse, q, k, v, *arrays = ctx.saved_tensors
        problem = put_together(ctx.bare, arrays)
        _, _, of = attention_backward_vjp(tangents_of(*moved), dout, dlse, q, k, v, out, lse, problem)
        if dout_dot is None and dlse_dot is None:
            return tuple(of)
        dout_dot = torch.zeros_like(dout) if dout_dot is None else dout_dot
        more = ctx.kernel.backward(dout_dot, dlse_dot, q, k, v, out, lse, problem)
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
        """Differentiate the formula as it is written, out and lse as part of it: a third derivative is recorded."""
        operands = ctx.saved_tensors
        moving = [i for i, x in enumerate(operands) if x is not None and x.is_floating_point() and i not in OUT_AND_LSE]

        def formula(*given: Any) -> Any:
            now = list(operands)
            for i, x in zip(moving, given, strict=True):
                now[i] = x
            *before, _, _, q, k, v = now[:12]
            out, lse = attention(ctx.kernel, q, k, v, put_together(ctx.bare, now[12:]))
            return tuple(y for y in second(ctx.bare, *before, out, lse, *now[9:]) if y is not None)

        ys, pull = torch.func.vjp(formula, *(operands[i] for i in moving))
        given = (u for u, there in zip(cotangents, ctx.present, strict=True) if there)
        dys = tuple(torch.zeros_like(y) if u is None else u for u, y in zip(given, ys, strict=True))
        grads = dict(zip(moving, pull(dys), strict=True))
        return None, None, *(grads.get(i) for i in range(len(operands)))


def second(bare: Problem, *operands: Any) -> tuple[Array | None, ...]:
    """Return what :class:`_Second` does, each in the dtype of what it belongs to."""
    cotangents, (dout, dlse, out, lse, q, k, v), arrays = operands[:5], operands[5:12], operands[12:]
    problem = put_together(bare, arrays)
    ddout, ddlse, of = attention_backward_vjp(Tangents(*cotangents), dout, dlse, q, k, v, out, lse, problem)
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
