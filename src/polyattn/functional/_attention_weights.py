"""The attention weights themselves: for looking at. They hold one number for each pair of query and key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..backend import Array, Backend
from ..kernels import Problem, Record, cast, expand, unbroadcast, widen
from ..kernels._plain import (
    attention_scores,
    exponentials,
    nonzero,
    repeat_heads,
    scores_backward,
    sinks_gradient,
    sum_heads,
)
from ._arguments import checked_options, checked_sizes, make_problem
from ._attention import AttentionGrads, with_head
from ._dispatch import Operation, run

__all__ = ["attention_weights"]


@dataclass(frozen=True, eq=False)
class Saved(Record):
    """What the backward needs."""

    q: Array
    k: Array
    problem: Problem

    ARRAYS: ClassVar[tuple[str, ...]] = ("q", "k", "problem")


def forward(
    backend: Backend, q: Array, k: Array, *, kernel: str | None = None, **arguments: Any
) -> tuple[Array, Saved]:
    """Return softmax(scores) with excluded weights exactly zero."""
    xp, problem = backend.namespace(), make_problem(backend, q, backend.device_of(q), **arguments)
    if problem.sizes.empty:
        weights = xp.zeros(problem.sizes.scores, dtype=q.dtype, device=problem.native_device)
    else:
        k_ = repeat_heads(widen(xp, with_head(k)), problem)
        scores, _, allowed = attention_scores(widen(xp, with_head(q)), k_, problem)
        weights, _ = _weights(scores, allowed, problem)
        weights = expand(xp, cast(xp, weights, q.dtype), problem.sizes.scores)
    return weights[0, ...] if q.ndim == k.ndim == 2 else weights, Saved(q, k, problem)


def backward(backend: Backend, dweights: Array, saved: Saved) -> AttentionGrads:
    """Reverse the softmax and the scores; the values have no part in it."""
    xp, problem = backend.namespace(), saved.problem
    q, k = with_head(saved.q), with_head(saved.k)
    if problem.sizes.empty:
        zeros = (None if x is None else xp.zeros_like(x) for x in (problem.bias_array, problem.sinks))
        return AttentionGrads(xp.zeros_like(saved.q), xp.zeros_like(saved.k), None, *zeros)
    q_, k_ = widen(xp, q), widen(xp, repeat_heads(k, problem))
    scores, capped, allowed = attention_scores(q_, k_, problem)
    weights, lse = _weights(scores, allowed, problem)
    dweights = xp.reshape(widen(xp, dweights), problem.sizes.scores)
    shift = -xp.sum(xp.where(xp.equal(weights, 0), xp.zeros_like(dweights), weights * dweights), axis=-1)
    dscores = weights * (dweights + shift[..., None])
    dq, dk, dbias = scores_backward(dscores, q_, k_, capped, allowed, problem)
    dq, dk = unbroadcast(xp, dq, (*q_.shape,)), sum_heads(dk, k, problem)
    dsinks = sinks_gradient(shift, lse, problem)
    dq, dk = (cast(xp, xp.reshape(dx, x.shape), x.dtype) for dx, x in ((dq, saved.q), (dk, saved.k)))
    return AttentionGrads(dq, dk, None, dbias, dsinks)


def _weights(scores: Array, allowed: Array | None, problem: Problem) -> tuple[Array, Array]:
    """Return the softmax, exactly zero where excluded, and the log of its denominator."""
    xp = problem.xp
    exp, total, largest = exponentials(scores, allowed, problem)
    weights = exp / nonzero(xp, total)
    if allowed is not None:
        weights = xp.where(allowed, weights, xp.zeros_like(weights))
    return weights, xp.squeeze(xp.log(total) + largest, axis=-1)


OPERATION = Operation("attention_weights", forward, backward)


def attention_weights(
    q: Array, k: Array, *, mask: Array | None = None, bias: Array | None = None, causal: bool = False,
    q_offset: int | Array | None = None, window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Array | None = None, segment_ids: tuple[Array, Array] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Array | None = None, dropout: float = 0.0,
    seed: int | Array | None = None, backend: str | None = None, kernel: str | None = None,
) -> Array:  # fmt: skip
    """Return the weights that :func:`attention` gives to each key, ``(…, H, n_q, n_k)``, before dropout.

    The arguments are those of :func:`attention`; dropout, seed and kernel are taken and change nothing.
    Rows sum to one (with sinks: to less), excluded weights are zero, an empty row is zero.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.attention_weights(np.zeros((2, 4)), np.zeros((2, 4)), causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    arrays, options = checked_options(
        checked_sizes(q, k, None), mask=mask, bias=bias, causal=causal, q_offset=q_offset, window=window,
        key_lengths=key_lengths, segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout,
        seed=seed, kernel=kernel,
    )  # fmt: skip
    return run(OPERATION, {"q": q, "k": k, **arrays}, options, backend)
