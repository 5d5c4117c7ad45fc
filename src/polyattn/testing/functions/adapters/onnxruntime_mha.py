"""onnxruntime's own operator com.microsoft.MultiHeadAttention, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from . import _onnx_model

LAYOUT = "bnhd"
VERSION = onnxruntime.__version__
DTYPES = ("float32",)


def attention(q: Any, k: Any, v: Any, *, bias: Any = None, causal: bool = False, scale: float | None = None) -> Any:
    """Run a model of one node, on (batch, n, heads · d)."""
    heads = q.shape[2]
    if k.shape[2] != heads:
        raise NotImplementedError("MultiHeadAttention has no grouped heads")
    q, k, v = (np.ascontiguousarray(x).reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (q, k, v))
    unused = {"bias_of_projections": None, "key_padding_mask": None}
    inputs = {"query": q, "key": k, "value": v, **unused, "attention_bias": bias}
    attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": int(causal)}
    if scale is not None:
        attributes["scale"] = float(scale)
    model = _onnx_model.single_node("MultiHeadAttention", inputs, attributes, "com.microsoft")
    out = _onnx_model.on_runtime(model, inputs)
    return out.reshape(*out.shape[:2], heads, out.shape[2] // heads)
