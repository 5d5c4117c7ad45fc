"""One autograd node for any pair of forward and backward. This module imports torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from polyattn.backend import flatten

from ._tracing import transformed


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


class _Node(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    """``y = forward(*arrays)[0]``."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *arrays: Any) -> Any:
        with call.scope():
            y, held = call.run(*arrays)
        _keep(ctx, call, y, held, arrays)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
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
        (dy,) = transpose(tuple(tangents[i] for i in moved))
        return dy


class _Transformed(torch.autograd.Function):  # type: ignore[misc]  # as above
    """The same node for torch.func: the saved arrays are further outputs, so that a transform applies to them.

    This form of a node takes three times as long to call.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *arrays: Any) -> Any:
        with call.scope():
            y, held = call.run(*arrays)
        # A saved array may be y or an input; as a separate output without a gradient it must be another tensor.
        return y, *(s.detach() for s in held)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *arrays = inputs
        y, *held = output
        ctx.mark_non_differentiable(*held)
        _keep(ctx, call, y, held, arrays)

    @staticmethod
    def backward(ctx: Any, dy: Any, *_: Any) -> Any:
        return _Node.backward(ctx, dy)

    @staticmethod
    def jvp(ctx: Any, _call: Any, *tangents: Any) -> Any:
        return _Node.jvp(ctx, _call, *tangents), *(None for _ in range(ctx.saved_count))


def _keep(ctx: Any, call: _Call, y: Any, held: Any, arrays: Any) -> None:
    """Save the arrays for the backward: those of the forward's record, and the inputs."""
    ctx.call, ctx.saved_count, ctx.array_count = call, len(held), len(arrays)
    if forward_ad._current_level < 0:
        ctx.save_for_backward(*held, *arrays)
    else:  # these tensors stay in memory as long as the node, so save them only in forward mode
        kept = (*held, *arrays, torch.zeros_like(y))
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)


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
    """Run the pair as an autograd node."""
    if not torch.compiler.is_compiling():
        call = _Call(scope, forward, backward)
        return _Transformed.apply(call, *arrays)[0] if transformed() else _Node.apply(call, *arrays)
    if not transformed():
        return _Traced.apply(scope, forward, backward, *distinct(arrays))
    recording = torch.is_grad_enabled()
    with scope(), torch.set_grad_enabled(recording):  # torch.func differentiates the formula: no node is needed
        return forward(*arrays)[0]


def distinct(arrays: tuple[Any, ...]) -> list[Any]:
    """Replace repeated arrays by views: torch.compile does not support the same tensor in two arguments."""
    found: list[Any] = []
    for x in arrays:
        again = x is not None and any(x is other for other in found)
        found.append(x.view_as(x) if again else x)
    return found
