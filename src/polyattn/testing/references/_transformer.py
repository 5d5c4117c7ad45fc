"""Multi-head attention with norms, rotary embedding and sinks, and the transformer block, for central differences."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._activations import geglu, gelu, relu, silu, swiglu
from ._attention import attention
from ._functional import Float, f64, linear
from ._layers import Parameters, _join, _project, _split
from ._norms import layer_norm, rms_norm
from ._rotary import rotary_embedding

ACTIVATIONS: dict[str, Any] = {"gelu": gelu, "relu": relu, "silu": silu, "swiglu": swiglu, "geglu": geglu}


def transformer_attention(
    parameters: Parameters,
    query: ArrayLike,
    key: ArrayLike,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    rotary: dict[str, Any] | None = None,
    positions: tuple[ArrayLike, ArrayLike] | None = None,
    qk_norm: str | None = None,
    eps: float = 1e-6,
    **arguments: Any,
) -> Float:
    """Return multi-head attention with norms and rotary embedding of queries and keys, and with learnt sinks.

    ``rotary`` has the arguments of :func:`rotary_embedding`.
    """
    norms: dict[str | None, Any] = {"rms": rms_norm, "layer": layer_norm}
    heads = []
    n_q, n_k = np.shape(query)[-2], np.shape(key)[-2]
    offset = arguments.get("q_offset")
    starts = (np.asarray(n_k - n_q if offset is None else offset), np.asarray(0))
    for i, (name, x, count) in enumerate((("q", query, num_heads), ("k", key, num_kv_heads or num_heads))):
        head = _split(_project(x, parameters, f"{name}_proj"), count)
        if qk_norm is not None:
            head = norms[qk_norm](head, parameters[f"{name}_norm.weight"], eps=eps)
        if rotary is not None:
            steps = starts[i][..., None] + np.arange(head.shape[-2]) if positions is None else positions[i]
            head = rotary_embedding(head, positions=steps, **rotary)
        heads.append(head)
    value = _split(_project(key, parameters, "v_proj"), num_kv_heads or num_heads)
    if "sinks" in parameters:
        arguments["sinks"] = parameters["sinks"]
    return _project(_join(attention(heads[0], heads[1], value, **arguments).out), parameters, "out_proj")


def transformer_block(
    parameters: Parameters,
    x: ArrayLike,
    *,
    norm_first: bool = True,
    norm: str = "layer",
    eps: float = 1e-5,
    activation: str = "gelu",
    **arguments: Any,
) -> Float:
    """Return x + f(norm(x)), or norm(x + f(x)), with f attention and then the feed-forward layer."""
    x = f64(x)

    def part(name: str) -> Parameters:
        return {key.removeprefix(f"{name}."): p for key, p in parameters.items() if key.startswith(f"{name}.")}

    def attend(x: Float) -> Float:
        return transformer_attention(part("attention"), x, x, **arguments)

    def feed(x: Float) -> Float:
        p = part("feed_forward")
        halves = [_project(x, p, name) for name in ("gate_proj", "up_proj") if f"{name}.weight" in p]
        return linear(ACTIVATIONS[activation](*halves), p["down_proj.weight"], p.get("down_proj.bias"))

    for name, inner in (("norm1", attend), ("norm2", feed)):
        p = part(name)

        def normed(x: Float, p: Parameters = p) -> Float:
            return rms_norm(x, p["weight"], eps) if norm == "rms" else layer_norm(x, p["weight"], p.get("bias"), eps)

        x = x + inner(normed(x)) if norm_first else normed(x + inner(x))
    return x
