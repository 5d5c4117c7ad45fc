"""torch's FlexAttention, not compiled: its masks and biases are functions of positions."""

from __future__ import annotations

from typing import Any

from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as flex

ARRAYS = "torch"


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    softcap: float | None = None,
) -> Any:  # fmt: skip
    """Express the arguments as a ``score_mod`` and a block mask."""

    def at(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return x.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])[b, h, i, j]

    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = i >= j if causal else i >= 0
        return seen if mask is None else seen & at(mask, b, h, i, j)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        s = s if softcap is None else softcap * (s / softcap).tanh()
        return s if bias is None else s + at(bias, b, h, i, j)

    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    block_mask = None if mask is None and not causal else create_block_mask(allowed, *shape, device="cpu")
    changed = None if bias is None and softcap is None else score
    grouped = q.shape[1] != k.shape[1]
    return flex(q, k, v, score_mod=changed, block_mask=block_mask, scale=scale, enable_gqa=grouped)
