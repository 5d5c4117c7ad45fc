"""Multi-head attention as a formula: projections around attention, and its backward through every path."""

from __future__ import annotations

from typing import Any

from ..backend import Array, Backend, Place
from ..functional import _attention, _linear
from ..functional._arguments import ARRAYS, Settings
from . import _heads
from ._heads import Outline, Plan, join_heads, sources, split_heads

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
PARAMETERS = (
    *(f"{name}.weight" for name in PROJECTIONS), *(f"{name}.bias" for name in PROJECTIONS),
    "q_norm.weight", "k_norm.weight", "sinks",
)  # fmt: skip
OWN = len(PARAMETERS)
EXTRAS = len(ARRAYS) - 3  # what attention takes besides q, k and v
ATTENTION_SAVED = len(ARRAYS) + 3  # out and the row statistics as well
SAVED = 3 + OWN + 2 * _heads.SAVED + ATTENTION_SAVED
"""How many arrays a forward saves."""


def forward(
    backend: Backend, query: Array, key: Array | None, value: Array | None, *rest: Array, settings: Settings,
    plan: Plan,
) -> tuple[Array, tuple[Any, ...]]:  # fmt: skip
    """Project, split into heads (turned, normalised), attend, join the heads, project."""
    xp, extras, (q_at, k_at), parameters = backend.namespace(), rest[:EXTRAS], rest[EXTRAS:-OWN], rest[-OWN:]
    q_w, k_w, v_w, out_w, q_b, k_b, v_b, out_b, q_norm, k_norm, sinks = parameters
    of_key, of_value = sources(query, key, value, plan.value_is_query)
    q, _ = _linear.forward(backend, query, q_w, q_b)  # (…, n_q, H·d_k)
    k, _ = _linear.forward(backend, of_key, k_w, k_b)  # (…, n_k, H_kv·d_k)
    v, _ = _linear.forward(backend, of_value, v_w, v_b)  # (…, n_k, H_kv·d_v)
    q, q_saved = _heads.forward(backend, q, plan.heads, q_norm, q_at, start_of(settings, extras), plan)
    k, k_saved = _heads.forward(backend, k, plan.kv_heads, k_norm, k_at, 0, plan)
    v = split_heads(xp, v, plan.kv_heads)
    extras = with_sinks(extras, sinks)
    out, attention_saved = _attention.forward(backend, q, k, v, *extras, settings=settings)  # (…, H, n_q, d_v)
    y, _ = _linear.forward(backend, join_heads(xp, out), out_w, out_b)  # (…, n_q, d_model)
    return y, (query, key, value, *parameters, *q_saved, *k_saved, *attention_saved)


def backward(
    backend: Backend, dy: Array, saved: tuple[Any, ...], *, settings: Settings, plan: Plan, inputs: bool = True
) -> tuple[Any, ...]:
    """Reverse each line; the gradients of query, key and value, then attention's, then the parameters'."""
    xp, (query, key, value), parameters = backend.namespace(), saved[:3], saved[3 : 3 + OWN]
    heads_saved, attention_saved = saved[3 + OWN : -ATTENTION_SAVED], saved[-ATTENTION_SAVED:]
    q_saved, k_saved = heads_saved[: _heads.SAVED], heads_saved[_heads.SAVED :]
    q_w, k_w, v_w, out_w, q_b, k_b, v_b, out_b, _, _, sinks = parameters
    # y = join(out) W + b
    out = attention_saved[-3]
    djoined, dout_w, dout_b = _linear.backward(backend, dy, (join_heads(xp, out), out_w, out_b))
    dout = split_heads(xp, djoined, plan.heads)  # (…, H, n_q, d_v)
    dq, dk, dv, *dextras = _attention.backward(backend, dout, attention_saved, settings=settings)
    dsinks = None
    if sinks is not None:
        dsinks, dextras[1] = dextras[1], None
    # q, k, v = heads(query W + b), heads(key W + b), heads(value W + b)
    dv = join_heads(xp, dv)
    dk, dk_norm = _heads.backward(backend, dk, k_saved, plan)
    dq, dq_norm = _heads.backward(backend, dq, q_saved, plan)
    of_key, of_value = sources(query, key, value, plan.value_is_query)
    dquery, dq_w, dq_b = _linear.backward(backend, dq, (query, q_w, q_b), inputs=inputs)
    dkey, dk_w, dk_b = _linear.backward(backend, dk, (of_key, k_w, k_b), inputs=inputs)
    dvalue, dv_w, dv_b = _linear.backward(backend, dv, (of_value, v_w, v_b), inputs=inputs)
    if inputs:  # each has the sum over the paths that used it
        if value is None and plan.value_is_query:
            dquery, dvalue = dquery + dvalue, None
        elif value is None:
            dkey, dvalue = dkey + dvalue, None
        if key is None:
            dquery, dkey = dquery + dkey, None
    dparameters = (dq_w, dk_w, dv_w, dout_w, dq_b, dk_b, dv_b, dout_b, dq_norm, dk_norm, dsinks)
    return (dquery, dkey, dvalue, *dextras, None, None, *dparameters)


def start_of(settings: Settings, extras: tuple[Any, ...]) -> int | Array:
    """Return the position of the first query among the keys."""
    q_offset: Array = extras[ARRAYS.index("q_offset") - 3]
    return q_offset if settings.q_offset is None else settings.q_offset


def with_sinks(extras: tuple[Any, ...], sinks: Any) -> tuple[Any, ...]:
    """Return attention's other arrays with the layer's sinks among them, where it has some."""
    return extras if sinks is None else (extras[0], sinks, *extras[2:])


def prepare(place: Place, arrays: tuple[Any, ...], static: dict[str, Any]) -> dict[str, Any]:
    """Choose the attention kernel, from the problem's sizes and the inputs' dtype."""
    plan, query = static["plan"], arrays[0]
    extras = with_sinks(arrays[3 : len(ARRAYS)], Outline((plan.heads,), query.dtype) if plan.sinks else None)
    return {**static, **_attention.prepare(place, (*arrays[:3], *extras), {"settings": static["settings"]})}
