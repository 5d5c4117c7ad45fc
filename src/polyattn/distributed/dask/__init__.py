"""Attention on Dask arrays, whose chunks may be on many machines and larger than memory together."""

from __future__ import annotations

from ._arrays import chunked, computed, keep
from ._attention import attention, attention_backward, attention_forward
from ._kernel import GRAPH
from ._training import Gradients, mean_gradients

__all__ = [
    "GRAPH", "Gradients", "attention", "attention_backward", "attention_forward", "chunked", "computed", "keep",
    "mean_gradients",
]  # fmt: skip
