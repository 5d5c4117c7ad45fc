"""One autograd node for any forward and backward pair. Imported only once torch is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _Pair(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``y = forward(*arrays)[0]``; what was saved are further outputs, so that torch.func can follow them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(forward: Any, backward: Any, *arrays: Any) -> Any:
        y, saved = forward(*arrays)
        # What is saved may be y or an input itself; as an output of its own, without a gradient, it is another tensor.
        held = tuple(s.detach() for s in saved if s is not None)
        return (y, tuple(s is not None for s in saved), *held)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, present, *held = output
        ctx.op_backward, ctx.present = inputs[1], present
        ctx.mark_non_differentiable(*held)
        ctx.save_for_backward(*held)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        held = iter(ctx.saved_tensors)
        saved = tuple(next(held) if there else None for there in ctx.present)
        return (None, None, *ctx.op_backward(dy, saved))


def apply(forward: Callable[..., Any], backward: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    """Run the pair; where nothing requires gradients, only the forward and without a graph."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays):
        return _Pair.apply(forward, backward, *arrays)[0]
    with torch.no_grad():
        return forward(*arrays)[0]
