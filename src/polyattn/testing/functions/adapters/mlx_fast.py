"""MLX's mlx.core.fast.scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

ARRAYS = "mlx"
VERSION = metadata.version("mlx")
DTYPES = ("float32", "float16", "bfloat16")


def make(x: NDArray[Any], dtype: str) -> Any:
    """Return an array of MLX."""
    kind = getattr(mx, "bool_" if dtype == "bool" else dtype)
    return mx.array(np.asarray(x, dtype="float32" if dtype == "bfloat16" else dtype)).astype(kind)


def to_numpy(x: Any) -> NDArray[Any]:
    """Return an array of NumPy, with float32 for 16 bits."""
    return np.array(x.astype(mx.float32) if x.dtype in (mx.float16, mx.bfloat16) else x)


def vjp(function: Callable[..., Any], arrays: Sequence[Any], dout: Any) -> Sequence[Any]:
    """Return the gradients of the arrays."""
    return list(mx.vjp(function, list(arrays), [dout])[1])


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    sinks: Any = None,
) -> Any:  # fmt: skip
    """Pass causality, a boolean mask or a bias as MLX's one mask; it has no default scale."""
    given = mask if bias is None else bias
    if mask is not None and bias is not None:
        given = mx.where(mask, bias, float("-inf"))
    if causal:
        given = "causal" if given is None else given
        if not isinstance(given, str):
            raise NotImplementedError("MLX has one mask: causal or an array")
    return mx.fast.scaled_dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale, mask=given, sinks=sinks
    )
