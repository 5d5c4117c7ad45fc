"""One autograd node for any forward and backward pair. Imported only once torch is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from ._modes import transformed


class _Pair(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``y = forward(*arrays)[0]``; what was saved are further outputs, so that torch.func can follow them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(scope: Any, forward: Any, backward: Any, *arrays: Any) -> Any:
        with scope():
            y, saved = forward(*arrays)
        # What is saved may be y or an input itself; as an output of its own, without a gradient, it is another tensor.
        return (y, *(None if s is None else s.detach() for s in saved))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        y, *held = output
        ctx.pair, ctx.saved_count, ctx.array_count = inputs[:3], len(held), len(inputs) - 3
        ctx.mark_non_differentiable(*(s for s in held if s is not None))
        if forward_ad._current_level < 0:
            ctx.save_for_backward(*held, *inputs[3:])
        else:  # a node holds these until it goes, so only where jvp is asked for
            kept = (*held, *inputs[3:], torch.zeros_like(y))
            ctx.save_for_backward(*kept)
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        scope, forward, backward = ctx.pair
        tensors, create_graph = ctx.saved_tensors, torch.is_grad_enabled()
        with scope():
            if not create_graph:
                return (None, None, None, *backward(dy, tensors[: ctx.saved_count]))
            arrays = tensors[ctx.saved_count : ctx.saved_count + ctx.array_count]
            with torch.enable_grad():  # what was saved has to depend on the inputs again
                return (None, None, None, *backward(dy, forward(*arrays)[1]))

    @staticmethod
    def jvp(ctx: Any, _scope: Any, _forward: Any, _backward: Any, *tangents: Any) -> Any:
        """Turn the backward round: it is linear in dy, and what is linear has a transpose."""
        _, _, backward = ctx.pair
        *tensors, zero = ctx.saved_tensors
        saved, moved = tuple(tensors[: ctx.saved_count]), [i for i, u in enumerate(tangents) if u is not None]

        def grads(dy: Any) -> Any:
            dxs = backward(dy, saved)
            return tuple(dxs[i] for i in moved)

        _, turned = torch.func.vjp(grads, zero)
        return (*turned(tuple(tangents[i] for i in moved)), *(None for _ in saved))


class _Traced(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """The same where torch.compile follows, which takes neither ``jvp`` nor outputs that are None."""

    @staticmethod
    def forward(ctx: Any, scope: Any, forward: Any, backward: Any, *arrays: Any) -> Any:
        with scope():
            y, saved = forward(*arrays)
        ctx.scope, ctx.pull, ctx.present = scope, backward, tuple(s is not None for s in saved)
        ctx.save_for_backward(*(s for s in saved if s is not None))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        tensors = iter(ctx.saved_tensors)
        saved = tuple(next(tensors) if there else None for there in ctx.present)
        with ctx.scope():
            return (None, None, None, *ctx.pull(dy, saved))


def apply(
    scope: Callable[[], Any], forward: Callable[..., Any], backward: Callable[..., Any], arrays: tuple[Any, ...]
) -> Any:
    """Run the pair; where nothing requires gradients, only the forward and without a graph."""
    if torch.compiler.is_compiling() and transformed():  # no node is looked for there: torch has the formula itself
        recording = torch.is_grad_enabled()
        with scope(), torch.set_grad_enabled(recording):
            return forward(*arrays)[0]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays):
        if torch.compiler.is_compiling():
            return _Traced.apply(scope, forward, backward, *distinct(arrays))
        return _Pair.apply(scope, forward, backward, *arrays)[0]
    with scope():
        return forward(*arrays)[0]


def distinct(arrays: tuple[Any, ...]) -> list[Any]:
    """Return the arrays, a view for each that was there before: torch.compile takes a tensor once."""
    found: list[Any] = []
    for x in arrays:
        again = x is not None and any(x is other for other in found)
        found.append(x.view_as(x) if again else x)
    return found
