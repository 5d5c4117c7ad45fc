"""torch.nn.MultiheadAttention, with projections that change nothing.

Its heads share one width, which is that of the values too.
"""

from __future__ import annotations

from typing import Any

import torch

ARRAYS = "torch"
DECLARED = {"nan.in_value": "the output projection multiplies NaN by the zeros of its matrix"}


def attention(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False) -> Any:
    """Call the layer on (batch, n, heads · d); its boolean masks are True where a query may not attend."""
    batch, heads, n_q, d = q.shape
    layer = torch.nn.MultiheadAttention(heads * d, heads, bias=False, batch_first=True, dtype=q.dtype)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(heads * d, dtype=q.dtype).repeat(3, 1))
        layer.out_proj.weight.copy_(torch.eye(heads * d, dtype=q.dtype))
    given = None
    if bias is not None:
        given = bias if mask is None else bias.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        given = ~mask
    if causal:
        upper = torch.ones(n_q, k.shape[2], dtype=torch.bool).triu(1)
        if given is None:
            given = upper
        else:
            given = given | upper if given.dtype == torch.bool else given.masked_fill(upper, float("-inf"))
    if given is not None:
        given = given.expand(batch, heads, n_q, k.shape[2]).reshape(batch * heads, n_q, k.shape[2])
    packed = (x.transpose(1, 2).reshape(x.shape[0], x.shape[2], x.shape[1] * x.shape[3]) for x in (q, k, v))
    out, _ = layer(*packed, attn_mask=given, need_weights=False)
    return out.reshape(batch, n_q, heads, d).transpose(1, 2)
