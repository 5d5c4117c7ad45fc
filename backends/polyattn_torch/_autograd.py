"""One autograd node for any pair of forward and backward. This module imports torch."""

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
    """A forward, its backward, and the structure of the record that the forward saved."""

    scope: Callable[[], Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    structure: Any = None

    def run(self, *arrays: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return y and the saved arrays."""
        y, saved = self.forward(*arrays)
        held, self.structure = flatten(saved)
        return y, held

    def pull(self, dy: Any, held: Any) -> tuple[Any, ...]:
        """Return the gradients, computed from the saved arrays ``held``."""
        grads: tuple[Any, ...] = self.backward(dy, self.structure.build(held))
        return grads


class _Pair(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``y = forward(*arrays)[0]``; the saved arrays are further outputs, so that torch.func can transform them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *arrays: Any) -> Any:
        with call.scope():
            y, held = call.run(*arrays)
        # A saved array may be y or an input; as a separate output without a gradient it must be another tensor.
        return y, *(s.detach() for s in held)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *arrays = inputs
        y, *held = output
        ctx.saved_count, ctx.array_count = len(held), len(arrays)
        ctx.mark_non_differentiable(*held)
        if forward_ad._current_level < 0:
            ctx.save_for_backward(*held, *arrays)
        else:  # these tensors stay in memory as long as the node, so save them only in forward mode
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
            with torch.enable_grad():  # compute the saved arrays again, as functions of the inputs
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
    """The same node for torch.compile, which supports neither ``jvp`` nor outputs that are None."""

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
    """Run the pair as an autograd node; if no input requires gradients, run only the forward, without a graph."""
    if torch.compiler.is_compiling() and transformed():  # torch.func differentiates the formula: no node is needed
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
    """Replace repeated arrays by views: torch.compile does not support the same tensor in two arguments."""
    found: list[Any] = []
    for x in arrays:
        again = x is not None and any(x is other for other in found)
        found.append(x.view_as(x) if again else x)
    return found
