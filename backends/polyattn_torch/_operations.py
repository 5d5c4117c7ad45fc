"""torch's fused attention operations with one signature, and the choice of one for a problem. Imports torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.backend import Array, Problem

__all__ = ["cuda_reason", "operation"]

aten = torch.ops.aten
GRID = 65535  # CUDA's limit for two of the three axes of a grid


class Cpu:
    """``_scaled_dot_product_flash_attention_for_cpu``, in float32 at least, because it sums in the input dtype."""

    multiple, flat = 1, True

    @staticmethod
    def dtype(dtype: Any) -> Any:
        """Return the dtype to compute in."""
        return dtype if dtype == torch.float64 else torch.float32

    @staticmethod
    def forward(q: Array, k: Array, v: Array, causal: bool, mask: Any, scale: float) -> Any:
        """Return out and lse."""
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)

    @staticmethod
    def backward(
        dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool, mask: Any, scale: float
    ) -> Any:
        """Return the gradients of q, k and v."""
        run = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return run(dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)


class Flash:
    """``_scaled_dot_product_flash_attention`` on CUDA: 16-bit dtypes, up to 256 features, a multiple of 8."""

    multiple, flat = 8, False

    @staticmethod
    def dtype(dtype: Any) -> Any:
        """Return the dtype to compute in."""
        return dtype

    @staticmethod
    def forward(q: Array, k: Array, v: Array, causal: bool, mask: Any, scale: float) -> Any:
        """Return out and lse."""
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]

    @staticmethod
    def backward(
        dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool, mask: Any, scale: float
    ) -> Any:
        """Return the gradients of q, k and v."""
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # random state, unused without dropout
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, state, state,
            scale=scale,
        )  # fmt: skip


class Efficient:
    """``_scaled_dot_product_efficient_attention`` on CUDA: problems that Flash does not support. Its lse is padded."""

    multiple, flat = 8, False

    @staticmethod
    def dtype(dtype: Any) -> Any:
        """Return the dtype to compute in."""
        return dtype

    @staticmethod
    def forward(q: Array, k: Array, v: Array, causal: bool, mask: Any, scale: float) -> Any:
        """Return out and lse."""
        run = aten._scaled_dot_product_efficient_attention
        out, lse, *_ = run(q, k, v, None, True, 0.0, causal, scale=scale)
        return out, lse[..., : q.shape[2]]

    @staticmethod
    def backward(
        dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, causal: bool, mask: Any, scale: float
    ) -> Any:
        """Return the gradients of q, k and v."""
        state = torch.empty((), dtype=torch.int64, device=q.device)
        lse = pad(lse, (0, -q.shape[2] % 32), value=math.inf)
        return aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, state, state, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]


def operation(problem: Problem) -> Any:
    """Return the fused operation for a problem."""
    if problem.device == "cpu":
        return Cpu
    small = max(problem.sizes.d_k, problem.sizes.d_v) <= 256 and problem.dtype != "float32"
    return Flash if small and torch.cuda.get_device_capability(problem.native_device) >= (8, 0) else Efficient


def cuda_reason(problem: Problem) -> str | None:
    """Return why the CUDA operations do not support a problem, or None if they do."""
    if torch.version.hip is not None:
        return "it is written for CUDA, not for ROCm"
    if problem.dtype == "float64":
        return "the fused operations on CUDA have no float64"
    if problem.dtype == "bfloat16" and torch.cuda.get_device_capability(problem.native_device) < (8, 0):
        return "the fused operations have no bfloat16 on this device"
    if max(math.prod(problem.sizes.batch), problem.sizes.heads) > GRID:
        return f"the fused operations on CUDA take at most {GRID} items, and as many heads"
    return None
