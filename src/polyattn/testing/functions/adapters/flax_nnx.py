"""flax.nnx.dot_product_attention."""

from __future__ import annotations

from typing import Any

import flax
from flax import nnx

ARRAYS = "jax"
LAYOUT = "bnhd"
VERSION = flax.__version__


def attention(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False) -> Any:
    """Call it; the names alone differ."""
    return nnx.dot_product_attention(q, k, v, bias=bias, mask=mask, is_causal=causal)
