"""The reference implementation of ONNX's Attention (opset 23)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from . import _onnx_model

VERSION = onnx.__version__
DTYPES = ("float32", "float64", "float16")


def evaluated(model: Any, inputs: Mapping[str, Any]) -> Any:
    """Run a model by the reference."""
    return np.asarray(ReferenceEvaluator(model).run(None, {name: x for name, x in inputs.items() if x is not None})[0])


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    softcap: float | None = None,
) -> Any:  # fmt: skip
    """Run a model of one node."""
    return _onnx_model.standard(evaluated, q, k, v, mask, bias, causal, scale, softcap)
