"""One autograd node for a forward and backward that another library computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import BackendMismatchError

__all__ = ["Pull", "elsewhere"]

Tensor = Any
Pull = Callable[[Tensor], tuple[Tensor | None, ...]]
"""Takes the gradient of the result, and returns one for each tensor."""


class _Elsewhere(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to the type checker
    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, Pull]], *tensors: Tensor | None) -> Tensor:
        y, ctx.pull = run(*(None if x is None else x.detach() for x in tensors))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if torch.is_grad_enabled():  # torch would take the gradients for constants
            raise BackendMismatchError(
                "create_graph=True: expected a call that torch computes, since no other backend's gradients can be "
                "differentiated again; select torch for it"
            )
        return (None, *ctx.pull(dy))


def elsewhere(run: Callable[..., tuple[Tensor, Pull]], *tensors: Tensor | None) -> Tensor:
    """Return ``run(*tensors)[0]``, computed on tensors without a graph; autograd's way back is its second result.

    torch.compile breaks its graph here: no tensor leaves torch while it is traced.

    Raises
    ------
    BackendMismatchError
        In the backward, if a graph of it is asked for.
    """
    if torch.compiler.is_compiling():
        _keep_outside()
        return _apply.outside(run, *tensors)  # type: ignore[attr-defined]  # it is there now
    return _Elsewhere.apply(run, *tensors)


def _apply(*arguments: Any) -> Tensor:
    return _Elsewhere.apply(*arguments)


def _keep_outside() -> None:
    """Make of the node what torch.compile does not enter: called while it compiles, so that the compiler is there."""
    _apply.outside = torch.compiler.disable(_apply, reason="another library computes it")  # type: ignore[attr-defined]


_keep_outside._dynamo_marked_constant = True  # type: ignore[attr-defined]
