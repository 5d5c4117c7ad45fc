"""One autograd node for any forward and backward pair. Imported only once torch is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Pair(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``y = forward(*arrays)[0]``; what was saved are further outputs, so that torch.func can follow them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scope: Any, forward: Any, backward: Any, *arrays: Any) -> Any:
        with scope():
            y, saved = forward(*arrays)
        # What is saved may be y or an input itself; as an output of its own, without a gradient, it is another tensor.
        held = tuple(s.detach() for s in saved if s is not None)
        return (y, tuple(s is not None for s in saved), *held)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.saved_present, *held = output
        arrays = inputs[3:]
        ctx.pair, ctx.given = inputs[:3], tuple(x is not None for x in arrays)
        ctx.mark_non_differentiable(*held)
        ctx.save_for_backward(*held, *(x for x in arrays if x is not None))

    @staticmethod
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        scope, forward, backward = ctx.pair
        tensors = iter(ctx.saved_tensors)
        saved, arrays = (
            tuple(next(tensors) if there else None for there in present) for present in (ctx.saved_present, ctx.given)
        )
        if torch.is_grad_enabled():  # create_graph=True: what was saved has to depend on the inputs again
            grads = backward(dy, forward(*arrays)[1])
        else:
            with scope():
                grads = backward(dy, saved)
        return (None, None, None, *grads)


def apply(
    scope: Callable[[], Any], forward: Callable[..., Any], backward: Callable[..., Any], arrays: tuple[Any, ...]
) -> Any:
    """Run the pair; where nothing requires gradients, only the forward and without a graph."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays):
        return _Pair.apply(scope, forward, backward, *arrays)[0]
    with scope():
        return forward(*arrays)[0]
