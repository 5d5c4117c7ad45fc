"""One autograd node for any forward and backward pair. Imported only once torch is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from polyattn.backend import flatten

from ._modes import transformed


@dataclass
class _Call:
    """A forward and its backward, and the structure of what the forward saved."""

    scope: Callable[[], Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    structure: Any = None

    def run(self, *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return y and the arrays that were saved."""
        y, saved = self.forward(*arrays)
        held, self.structure = flatten(saved)
        return y, held

    def pull(self, dy: Any, held: Any) -> tuple[Any, ...]:
        """Return the gradients, from what was saved."""
        grads: tuple[Any, ...] = self.backward(dy, self.structure.build(held))
        return grads


class _Pair(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``y = forward(*arrays)[0]``; what was saved are further outputs, so that torch.func can follow them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *arrays: Any) -> Any:
        with call.scope():
            y, held = call.run(*arrays)
        # What is saved may be y or an input itself; as an output of its own, without a gradient, it is another tensor.
        return y, *(s.detach() for s in held)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *arrays = inputs
        y, *held = output
        ctx.saved_count, ctx.array_count = len(held), len(arrays)
        ctx.mark_non_differentiable(*held)
        if forward_ad._current_level < 0:
            ctx.save_for_backward(*held, *arrays)
        else:  # a node holds these until it goes, so only where jvp is asked for
            kept = (*held, *arrays, torch.zeros_like(y))
            ctx.save_for_backward(*kept)
            ctx.save_for_forward(*kept)

    @staticmethod
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        call, tensors, create_graph = ctx.call, ctx.saved_tensors, torch.is_grad_enabled()
        with call.scope():
            if not create_graph:
                return (None, *call.pull(dy, tensors[: ctx.saved_count]))
            arrays = tensors[ctx.saved_count : ctx.saved_count + ctx.array_count]
            with torch.enable_grad():  # what was saved has to depend on the inputs again
                return (None, *call.pull(dy, call.run(*arrays)[1]))

    @staticmethod
    def jvp(ctx: Any, _call: Any, *tangents: Any) -> Any:
        """Transpose the backward, which is linear in dy."""
        *tensors, zero = ctx.saved_tensors
        held, moved = tensors[: ctx.saved_count], [i for i, u in enumerate(tangents) if u is not None]

        def grads(dy: Any) -> Any:
            dxs = ctx.call.pull(dy, held)
            return tuple(dxs[i] for i in moved)

        _, transpose = torch.func.vjp(grads, zero)
        return (*transpose(tuple(tangents[i] for i in moved)), *(None for _ in held))


class _Traced(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """The same where torch.compile follows, which takes neither ``jvp`` nor outputs that are None."""

    @staticmethod
    def forward(ctx: Any, scope: Any, forward: Any, backward: Any, *arrays: Any) -> Any:
        with scope():
            y, saved = forward(*arrays)
        held, ctx.structure = flatten(saved)
        ctx.scope, ctx.pull = scope, backward
        ctx.save_for_backward(*held)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        with ctx.scope():
            return (None, None, None, *ctx.pull(dy, ctx.structure.build(ctx.saved_tensors)))


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
        return _Pair.apply(_Call(scope, forward, backward), *arrays)[0]
    with scope():
        return forward(*arrays)[0]


def distinct(arrays: tuple[Any, ...]) -> list[Any]:
    """Return the arrays, a view for each that was there before: torch.compile takes a tensor once."""
    found: list[Any] = []
    for x in arrays:
        again = x is not None and any(x is other for other in found)
        found.append(x.view_as(x) if again else x)
    return found
