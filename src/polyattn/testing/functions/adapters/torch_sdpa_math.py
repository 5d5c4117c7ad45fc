"""torch.nn.functional.scaled_dot_product_attention with torch's math kernel alone."""

from __future__ import annotations

from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel

from . import torch_sdpa

ARRAYS = "torch"


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    dropout: float = 0.0,
) -> Any:  # fmt: skip
    """Refuse what the kernel does not compute."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch_sdpa.attention(q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, dropout=dropout)
