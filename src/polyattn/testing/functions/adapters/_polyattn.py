"""polyattn's attention, which is differentiated by its own backward on every library."""

from __future__ import annotations

from typing import Any

import polyattn as pa

__all__ = ["attention", "backward"]


def attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, causal: bool = False, scale: float | None = None,
    dropout: float = 0.0, window: tuple[int | None, int | None] | None = None, key_lengths: Any = None,
    softcap: float | None = None, sinks: Any = None,
) -> Any:  # fmt: skip
    """Return the output; the seed of dropout is fixed."""
    return pa.attention(
        q, k, v, mask=mask, bias=bias, causal=causal, scale=scale, dropout=dropout, seed=0 if dropout else None,
        window=window, key_lengths=key_lengths, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def backward(dout: Any, q: Any, k: Any, v: Any, **arguments: Any) -> list[Any]:
    """Return the gradients of q, k, v, and of a bias."""
    _, cache = pa.attention_forward(q, k, v, **arguments)
    return [gradient for gradient in pa.attention_backward(dout, cache) if gradient is not None]
