"""keras.ops.dot_product_attention, on the backend that KERAS_BACKEND names; torch if it names none."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")
import keras  # it reads the variable when it is imported

ARRAYS = {"torch": "torch", "jax": "jax"}.get(keras.backend.backend(), "numpy")
LAYOUT = "bnhd"
VERSION = f"{keras.__version__} on {keras.backend.backend()}"


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    softcap: float | None = None,
) -> Any:  # fmt: skip
    """Call it; the names alone differ."""
    return keras.ops.dot_product_attention(
        q, k, v, bias=bias, mask=mask, scale=scale, is_causal=causal, attn_logits_soft_cap=softcap
    )
