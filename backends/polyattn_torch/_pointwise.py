"""Pointwise and row operations on CPU tensors by the native library. This module imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import distributed

from polyattn.backend import Array
from polyattn_native import BFLOAT16, LEAST_ROWS, operations

from ._tracing import opaque

__all__ = ["operation"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def operation(name: str, *arrays: Array | None, **options: Any) -> Any:
    """Return the results of an operation, or None: see ``polyattn.backend.Backend.operation``.

    The library gets views of the tensors' memory as NumPy arrays.
    """
    function = operations("torch").get(name)
    if function is None or opaque(*arrays):
        return None
    if name == "linear" and math.prod(arrays[0].shape[:-1]) < LEAST_ROWS:  # type: ignore[union-attr]  # x is given
        return None  # as the library would, but views of the tensors take longer than the product of few rows
    for x in arrays:
        if x is not None and not _plain(x):
            return None
    # A tensor that numpy() viewed cannot be resized any more, which is how FSDP frees parameters.
    shared = distributed.is_available() and distributed.is_initialized()
    results = function(*[_memory(x, np.from_dlpack if shared else torch.Tensor.numpy) for x in arrays], **options)
    return tuple([_tensor(x) for x in results]) if isinstance(results, tuple) else _tensor(results)


def _plain(x: torch.Tensor) -> bool:
    """Return whether a tensor is memory of the CPU that NumPy can view."""
    return x.is_cpu and x.dtype in DTYPES and x.layout is torch.strided and not x.is_neg()


def _memory(x: torch.Tensor | None, view: Callable[[torch.Tensor], Any]) -> Any:
    """Return the memory of a tensor as an array, the bits of bfloat16 numbers as integers."""
    if x is None:
        return None
    x = x.detach() if x.requires_grad else x
    return view(x.view(torch.int16) if x.dtype is torch.bfloat16 else x)


def _tensor(x: Any) -> torch.Tensor | None:
    """Return an array as a tensor on the same memory."""
    if x is None:
        return None
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if x.dtype == BFLOAT16 else tensor
