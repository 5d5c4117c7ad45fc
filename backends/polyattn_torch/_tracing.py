"""Whether torch records, transforms or traces tensors. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyattn.backend import Array, constant_result

__all__ = ["opaque", "requires_grad", "transformed"]


@constant_result
def transformed() -> bool:
    """Return whether a transform of torch.func is active."""
    import torch

    return torch._C._functorch.maybe_current_level() is not None


def requires_grad(arrays: Iterable[Array | None]) -> bool:
    """Return whether any of the arrays requires gradients."""
    for x in arrays:  # noqa: SIM110  # a generator would take longer than the loop
        if x is not None and x.requires_grad:
            return True
    return False


def opaque(*arrays: Array | None) -> bool:
    """Return whether torch traces, transforms or differentiates any of the arrays, so that it has no memory to read."""
    import torch

    if torch.is_grad_enabled() and requires_grad(arrays):
        return True
    if torch.compiler.is_compiling():
        return transformed()
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._len_torch_dispatch_stack():
        return True
    functorch, plain = torch._C._functorch, torch.Tensor.__torch_dispatch__
    in_transform: Any = functorch.maybe_current_level() is not None
    for x in arrays:
        if x is not None and type(x).__torch_dispatch__ is not plain:
            return True
        if in_transform and x is not None and functorch.is_functorch_wrapped_tensor(x):
            return True
    return False
