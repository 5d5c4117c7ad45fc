"""torch.nn.functional.scaled_dot_product_attention, with the kernel that torch chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ARRAYS = "torch"


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    dropout: float = 0.0,
) -> Any:  # fmt: skip
    """Pass a bias as the mask; torch has one argument for both."""
    if mask is not None and bias is not None:
        bias = bias.masked_fill(~mask, float("-inf"))
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask if bias is None else bias, dropout_p=dropout, is_causal=causal, scale=scale,
        enable_gqa=q.shape[-3] != k.shape[-3],
    )  # fmt: skip


def by_kernel(kernel: SDPBackend) -> Callable[..., Any]:
    """Return the function with one kernel of torch alone, which refuses what it does not compute."""

    @functools.wraps(attention)
    def chosen(*arrays: Any, **arguments: Any) -> Any:
        with sdpa_kernel(kernel):
            return attention(*arrays, **arguments)

    return chosen
