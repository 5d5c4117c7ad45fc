"""Pointwise and row operations on CPU tensors by the native library. This module imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import distributed

from polyattn.backend import Array
from polyattn_native import operations

from ._fused import opaque

__all__ = ["operation"]

DTYPES = (torch.float32, torch.float64)


def operation(name: str, *arrays: Array | None, **options: Any) -> Any:
    """Return the results of an operation, or None: see ``polyattn.backend.Backend.operation``.

    The library gets views of the tensors' memory as NumPy arrays.
    """
    function = operations("torch").get(name)
    if function is None or not all(x is None or _plain(x) for x in arrays) or opaque(*arrays):
        return None
    # A tensor that numpy() viewed cannot be resized any more, which is how FSDP frees parameters.
    shared = distributed.is_available() and distributed.is_initialized()
    view = np.from_dlpack if shared else torch.Tensor.numpy
    results = function(*(None if x is None else view(x.detach()) for x in arrays), **options)
    if isinstance(results, tuple):
        return tuple(None if x is None else torch.from_numpy(x) for x in results)
    return None if results is None else torch.from_numpy(results)


def _plain(x: torch.Tensor) -> bool:
    """Return whether a tensor is memory of the CPU that NumPy can view."""
    return x.is_cpu and x.dtype in DTYPES and x.layout is torch.strided and not x.is_neg()
