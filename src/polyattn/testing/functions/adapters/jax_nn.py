"""jax.nn.dot_product_attention."""

from __future__ import annotations

from typing import Any

import jax

ARRAYS = "jax"
LAYOUT = "bnhd"


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    key_lengths: Any = None, window: tuple[int, int] | None = None,
) -> Any:  # fmt: skip
    """Call it; the names alone differ."""
    return jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=mask, is_causal=causal, scale=scale, key_value_seq_lengths=key_lengths,
        local_window_size=window,
    )  # fmt: skip
