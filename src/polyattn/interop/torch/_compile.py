"""What lets ``torch.compile`` trace polyattn in one graph: it need not look into what is settled before the arrays.

Which backend is selected, what a dtype is called, and by how much a position turns are asked once, while torch
compiles. The registry has met tensors by then, since importing a plugin cannot be traced.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import registry
from ...backend import dtype_name
from ...functional._rotary_angles import digits
from ...functional._rotary_embedding import frequencies
from ...selection import selected

__all__ = ["prepare"]

SETTLED: tuple[Any, ...] = (selected, dtype_name, frequencies, digits)


def prepare() -> None:
    """Mark what is settled as ``torch.compiler.assume_constant_result`` does, without importing the compiler."""
    for function in SETTLED:
        function._dynamo_marked_constant = True
    for kind in (torch.Tensor, torch.nn.Parameter):
        registry.owner(kind(torch.empty(0)))
