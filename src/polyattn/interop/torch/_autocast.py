"""The dtype of a call under torch's autocast, and the cast of its tensors."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["asked_for", "lowered"]

Tensor = Any


def asked_for(x: Tensor) -> Any:
    """Return the dtype of autocast on the device of a tensor; None outside of autocast, and for float64."""
    kind = x.device.type if isinstance(x, torch.Tensor) else None
    if kind is None or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def lowered(x: Any, dtype: str) -> Any:
    """Cast a floating tensor, and return everything else unchanged; autograd casts the gradient back."""
    taken = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(getattr(torch, dtype)) if taken else x
