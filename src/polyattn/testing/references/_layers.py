"""Multi-head attention from its parameters, and its gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ._attention import attention, attention_gradients
from ._functional import Float, f64, linear, linear_gradients

Parameters = dict[str, Any]


def _project(x: ArrayLike, parameters: Parameters, name: str) -> Float:
    return linear(x, parameters[f"{name}.weight"], parameters.get(f"{name}.bias"))


def _split(x: Float, heads: int) -> Float:
    """Return (…, n, heads · d) as (…, heads, n, d)."""
    return np.swapaxes(x.reshape(*x.shape[:-1], heads, -1), -3, -2)


def _join(x: Float) -> Float:
    """Return (…, heads, n, d) as (…, n, heads · d)."""
    x = np.swapaxes(x, -3, -2)
    return x.reshape(*x.shape[:-2], -1)


def _heads(
    parameters: Parameters, query: ArrayLike, key: ArrayLike, value: ArrayLike, num_heads: int, num_kv_heads: int | None
) -> tuple[Float, Float, Float]:
    kv = num_kv_heads or num_heads
    return (
        _split(_project(query, parameters, "q_proj"), num_heads),
        _split(_project(key, parameters, "k_proj"), kv),
        _split(_project(value, parameters, "v_proj"), kv),
    )


def multi_head_attention(
    parameters: Parameters,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float | str | None = None,
    **arguments: Any,
) -> Float:
    """Return out_proj(attention(q_proj(query), k_proj(key), v_proj(value))), head by head."""
    q, k, v = _heads(parameters, query, key, value, num_heads, num_kv_heads)
    arguments["scale"] = 1 / math.sqrt(np.shape(query)[-1]) if scale == "model" else scale
    return _project(_join(attention(q, k, v, **arguments).out), parameters, "out_proj")


def multi_head_attention_gradients(
    dy: ArrayLike,
    parameters: Parameters,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    num_heads: int,
    num_kv_heads: int | None = None,
    scale: float | str | None = None,
    **arguments: Any,
) -> tuple[tuple[Float, Float, Float], Parameters]:
    """Return the gradients of query, key and value as separate inputs, and of the parameters by name."""
    q, k, v = _heads(parameters, query, key, value, num_heads, num_kv_heads)
    arguments["scale"] = 1 / math.sqrt(np.shape(query)[-1]) if scale == "model" else scale
    gradients: Parameters = {}

    def back(dy: ArrayLike, x: ArrayLike, name: str) -> Float:
        dx, dweight, dbias = linear_gradients(dy, x, parameters[f"{name}.weight"])
        gradients[f"{name}.weight"] = dweight
        if parameters.get(f"{name}.bias") is not None:
            gradients[f"{name}.bias"] = dbias
        return dx

    joined = _join(attention(q, k, v, **arguments).out)
    dout = _split(back(f64(dy), joined, "out_proj"), num_heads)
    slopes = attention_gradients(dout, q, k, v, **arguments)
    inputs = (
        back(_join(slopes.q), query, "q_proj"),
        back(_join(slopes.k), key, "k_proj"),
        back(_join(slopes.v), value, "v_proj"),
    )
    return inputs, gradients
