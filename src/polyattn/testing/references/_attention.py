"""Attention, one query row at a time over the keys that it may attend to.

A row never reads an excluded key, so the values there cannot affect it, as the
library guarantees too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._functional import Float, f64


class AttentionAnswer(NamedTuple):
    """The results of attention: the output, the log-sum-exp, and the weights before dropout."""

    out: Float
    lse: Float
    weights: Float


class AttentionSlopes(NamedTuple):
    """The gradients of attention's arguments; None for an absent argument."""

    q: Float
    k: Float
    v: Float
    bias: Float | None
    sinks: Float | None


class _Row(NamedTuple):
    keys: NDArray[np.intp]  # the keys that this row may attend to
    raw: Float  # scale · k q
    weights: Float
    sink_weight: float
    lse: float


def allowed_pairs(
    shape: tuple[int, ...],
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    causal: bool = False,
    q_offset: ArrayLike | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: ArrayLike | None = None,
    segment_ids: tuple[ArrayLike, ArrayLike] | None = None,
) -> NDArray[np.bool_]:
    """Return a boolean array of ``shape`` (…, H, n_q, n_k), True where a query may attend to a key."""
    n_q, n_k = shape[-2:]
    allowed = np.ones(shape, dtype=bool)
    offset = np.asarray(n_k - n_q if q_offset is None else q_offset)[..., None, None, None]
    distance = np.arange(n_k) - (offset + np.arange(n_q)[:, None])  # key position − query position
    if mask is not None:
        allowed &= np.asarray(mask, dtype=bool)
    if bias is not None:
        allowed &= ~np.isneginf(f64(bias))
    if causal:
        allowed &= distance <= 0
    if window is not None:
        left, right = window
        allowed &= (left is None) | (distance >= -(left or 0))
        allowed &= (right is None) | (distance <= (right or 0))
    if key_lengths is not None:
        allowed &= np.arange(n_k) < np.asarray(key_lengths)[..., None, None, None]
    if segment_ids is not None:
        of_query, of_key = (np.asarray(ids) for ids in segment_ids)
        allowed &= of_query[..., None, :, None] == of_key[..., None, None, :]
    return allowed


class _Setting:
    """The arguments, broadcast to (batch, H, n_q, n_k), and the computation of one row."""

    def __init__(
        self,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: ArrayLike | None = None,
        keep: ArrayLike | None = None,
        dropout: float = 0.0,
        **masks: Any,
    ) -> None:
        q, k, v = f64(q), f64(k), f64(v)
        self.shapes = (q.shape, k.shape, v.shape)
        self.single = q.ndim == k.ndim == v.ndim == 2
        q, k, v = (x if x.ndim > 2 else x[None] for x in (q, k, v))
        self.lead = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        self.group = q.shape[-3] // k.shape[-3] if k.shape[-3] else 1
        self.q, self.k, self.v = (np.broadcast_to(x, self.lead + x.shape[-3:]) for x in (q, k, v))
        shape = (*self.lead, q.shape[-3], q.shape[-2], k.shape[-2])
        self.allowed = allowed_pairs(shape, **masks)
        bias = masks.get("bias")
        self.bias_shape = None if bias is None else np.shape(bias)
        self.bias = np.broadcast_to(0.0 if bias is None else f64(bias), shape)
        self.scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None and q.shape[-1] else (scale or 0.0)
        self.softcap = softcap
        self.sinks = None if sinks is None else f64(sinks)
        kept = np.ones(shape, dtype=bool) if keep is None else np.broadcast_to(np.asarray(keep, dtype=bool), shape)
        self.factor = kept / (1.0 - dropout) if dropout < 1.0 else np.zeros(shape)

    def rows(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the index of every query row, and that of its key-value head."""
        every = np.ndindex(*self.allowed.shape[:-1])
        return [(index, (*index[:-2], index[-2] // self.group)) for index in every]

    def row(self, index: tuple[int, ...], head: tuple[int, ...]) -> _Row:
        keys = np.flatnonzero(self.allowed[index])
        raw = self.k[head][keys] @ self.q[index] * self.scale
        scores = raw if self.softcap is None else self.softcap * np.tanh(raw / self.softcap)
        scores = scores + self.bias[index][keys]
        logits = scores if self.sinks is None else np.append(scores, self.sinks[index[-2]])
        if keys.size == 0 and np.isneginf(logits).all():  # no key, and no sink; a sink of −inf counts as none
            return _Row(keys, raw, scores, 0.0, -math.inf)
        peak = np.max(logits)
        # Not exp(scores − lse): where all scores share one huge value, lse has no digit left for the sum.
        shares = np.exp(logits - peak)
        total = np.sum(shares)
        sink_weight = 0.0 if self.sinks is None else float(shares[-1] / total)
        return _Row(keys, raw, shares[: keys.size] / total, sink_weight, peak + math.log(total))


@np.errstate(all="ignore")
def attention(q: ArrayLike, k: ArrayLike, v: ArrayLike, **arguments: Any) -> AttentionAnswer:
    """Return softmax(scale · q kᵀ, capped, biased, masked) v, dropped where ``keep`` is False.

    The arguments are those of ``polyattn.attention``, with ``keep`` in place of the
    seed: booleans that broadcast to (…, H, n_q, n_k).
    """
    setting = _Setting(q, k, v, **arguments)
    out = np.zeros((*setting.allowed.shape[:-1], setting.v.shape[-1]))
    lse, weights = np.zeros(setting.allowed.shape[:-1]), np.zeros(setting.allowed.shape)
    for index, head in setting.rows():
        row = setting.row(index, head)
        lse[index] = row.lse
        weights[index][row.keys] = row.weights
        out[index] = (row.weights * setting.factor[index][row.keys]) @ setting.v[head][row.keys]
    if setting.single:
        return AttentionAnswer(out[0], lse[0], weights[0])
    return AttentionAnswer(out, lse, weights)


@np.errstate(all="ignore")
def attention_gradients(
    dout: ArrayLike, q: ArrayLike, k: ArrayLike, v: ArrayLike, dlse: ArrayLike | None = None, **arguments: Any
) -> AttentionSlopes:
    """Return the gradients of q, k, v, bias and sinks for the upstream gradients of out and of lse."""
    setting = _Setting(q, k, v, **arguments)
    rows = setting.allowed.shape[:-1]
    dout = f64(dout).reshape(*rows, setting.v.shape[-1])
    dlse = np.zeros(rows) if dlse is None else f64(dlse).reshape(rows)
    dq, dk, dv = np.zeros(setting.q.shape), np.zeros(setting.k.shape), np.zeros(setting.v.shape)
    dbias, dsinks = np.zeros(setting.allowed.shape), np.zeros(setting.allowed.shape[-3])
    for index, head in setting.rows():
        row = setting.row(index, head)
        factor = setting.factor[index][row.keys]
        dv[head][row.keys] += np.outer(row.weights * factor, dout[index])
        dweights = setting.v[head][row.keys] @ dout[index] * factor
        mean = np.sum(row.weights * dweights)
        dscores = row.weights * (dweights - mean + dlse[index])
        dsinks[index[-2]] += row.sink_weight * (dlse[index] - mean)
        dbias[index][row.keys] = dscores
        if setting.softcap is not None:
            dscores = dscores * (1 - np.tanh(row.raw / setting.softcap) ** 2)
        dq[index] = dscores @ setting.k[head][row.keys] * setting.scale
        dk[head][row.keys] += np.outer(dscores, setting.q[index]) * setting.scale
    of_q, of_k, of_v = setting.shapes
    return AttentionSlopes(
        sum_to(dq, of_q),
        sum_to(dk, of_k),
        sum_to(dv, of_v),
        None if setting.bias_shape is None else sum_to(dbias, setting.bias_shape),
        None if setting.sinks is None else dsinks.reshape(setting.sinks.shape),
    )


def sum_to(x: Float, shape: tuple[int, ...]) -> Float:
    """Return ``x`` summed over the axes along which ``shape`` was broadcast."""
    x = np.sum(x, axis=tuple(range(x.ndim - len(shape)))) if x.ndim > len(shape) else x
    stretched = tuple(axis for axis, size in enumerate(shape) if size == 1 != x.shape[axis])
    return np.asarray(np.sum(x, axis=stretched, keepdims=True))


def merge(parts: list[tuple[ArrayLike, ArrayLike]]) -> tuple[Float, Float]:
    """Return (out, lse) of attention over all keys from those over disjoint subsets of the keys."""
    outs, lses = [f64(out) for out, _ in parts], np.stack([f64(lse) for _, lse in parts])
    peak = np.max(lses, axis=0)
    shares = np.exp(lses - np.where(np.isneginf(peak), 0.0, peak))
    total = np.sum(shares, axis=0)
    shares = shares / np.where(total == 0, 1.0, total)
    with np.errstate(divide="ignore"):
        lse = np.where(np.isneginf(peak), 0.0, peak) + np.log(total)
    return np.asarray(sum(share[..., None] * out for share, out in zip(shares, outs, strict=True))), lse
