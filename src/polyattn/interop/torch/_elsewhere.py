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
        if torch.is_grad_enabled():  # torch would treat the gradients as constants
            raise BackendMismatchError(
                "create_graph=True: expected a call that torch computes, since no other backend's gradients can be "
                "differentiated again; select torch for it"
            )
        return (None, *ctx.pull(dy))


def elsewhere(run: Callable[..., tuple[Tensor, Pull]], *tensors: Tensor | None) -> Tensor:
    """Return ``run(*tensors)[0]``, computed on detached tensors; its second result is the backward for autograd.

    torch.compile breaks its graph here, because traced tensors cannot be converted.

    Raises
    ------
    BackendMismatchError
        In the backward, if it is called with ``create_graph=True``.
    """
    if torch.compiler.is_compiling():
        _keep_outside()
        return _apply.outside(run, *tensors)  # type: ignore[attr-defined]  # set by _keep_outside
    return _Elsewhere.apply(run, *tensors)


def _apply(*arguments: Any) -> Tensor:
    return _Elsewhere.apply(*arguments)


def _keep_outside() -> None:
    """Exclude the node from torch.compile; called while it compiles, because this needs the compiler to be loaded."""
    _apply.outside = torch.compiler.disable(_apply, reason="another library computes it")  # type: ignore[attr-defined]  # added here


_keep_outside._dynamo_marked_constant = True  # type: ignore[attr-defined]  # of torch
