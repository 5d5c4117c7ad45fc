"""onnxruntime's kernel of the standard's Attention (opset 23), on the CPU."""

from __future__ import annotations

from typing import Any

import onnxruntime

from . import _onnx_model

VERSION = onnxruntime.__version__
DTYPES = ("float32", "float16")


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    softcap: float | None = None,
) -> Any:  # fmt: skip
    """Run a model of one node."""
    return _onnx_model.standard(_onnx_model.on_runtime, q, k, v, mask, bias, causal, scale, softcap)
