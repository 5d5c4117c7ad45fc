"""The attention weights themselves: for looking at. They hold one number for each pair of query and key."""

from __future__ import annotations

from typing import Any

from ..backend import Array, Backend, Place
from ..kernels import Problem, cast, expand, unbroadcast, widen
from ..kernels._plain import (
    attention_scores,
    exponentials,
    nonzero,
    repeat_heads,
    scores_backward,
    sinks_gradient,
    sum_heads,
)
from ._arguments import Settings, checked, make_problem
from ._operation import Operation

__all__ = ["attention_weights"]


def prepare(place: Place, arrays: tuple[Any, ...], static: dict[str, Any]) -> dict[str, Any]:
    """Note the device, for creations."""
    return {"settings": static["settings"]._replace(device=place.device)}


def forward(backend: Backend, q: Array, k: Array, *rest: Array, settings: Settings) -> tuple[Array, tuple[Any, ...]]:
    """Return softmax(scores) with excluded weights exactly zero."""
    xp, problem = backend.namespace(), make_problem(Place(backend, settings.device), (q, k, *rest), settings)
    q_, k_ = (widen(xp, x if x.ndim > 2 else x[None, ...]) for x in (q, k))
    if problem.sizes.empty:
        weights = xp.zeros(problem.sizes.scores, dtype=q.dtype, device=problem.native_device)
    else:
        scores, _, allowed = attention_scores(q_, repeat_heads(k_, problem), problem)
        weights, _ = _weights(scores, allowed, problem)
        weights = expand(xp, cast(xp, weights, q.dtype), problem.sizes.scores)
    return weights[0, ...] if q.ndim == k.ndim == 2 else weights, (q, k, *rest)


def backward(backend: Backend, dweights: Array, saved: tuple[Any, ...], *, settings: Settings) -> tuple[Any, ...]:
    """Reverse the softmax and the scores."""
    (q, k, _, bias, sinks, *rest), xp = saved, backend.namespace()
    problem = make_problem(Place(backend, settings.device), saved, settings)
    if problem.sizes.empty:
        zeros = (None if x is None else xp.zeros_like(x) for x in (q, k, None, bias, sinks))
        return (*zeros, *(None for _ in rest))
    k_heads = k if k.ndim > 2 else k[None, ...]
    q_, k_ = widen(xp, q if q.ndim > 2 else q[None, ...]), widen(xp, repeat_heads(k_heads, problem))
    scores, capped, allowed = attention_scores(q_, k_, problem)
    weights, lse = _weights(scores, allowed, problem)
    dweights = xp.reshape(widen(xp, dweights), problem.sizes.scores)
    shift = -xp.sum(xp.where(xp.equal(weights, 0), xp.zeros_like(dweights), weights * dweights), axis=-1)
    dscores = weights * (dweights + shift[..., None])
    dq, dk, dbias = scores_backward(dscores, q_, k_, capped, allowed, problem)
    dq, dk = unbroadcast(xp, dq, (*q_.shape,)), sum_heads(dk, k_heads, problem)
    dsinks = sinks_gradient(shift, lse, problem)
    dq, dk = (cast(xp, xp.reshape(dx, x.shape), x.dtype) for dx, x in ((dq, q), (dk, k)))
    return (dq, dk, None, dbias, dsinks, *(None for _ in rest))


def _weights(scores: Array, allowed: Array | None, problem: Problem) -> tuple[Array, Array]:
    """Return the softmax, exactly zero where excluded, and the log of its denominator."""
    xp = problem.xp
    exp, total, largest = exponentials(scores, allowed, problem)
    weights = exp / nonzero(xp, total)
    if allowed is not None:
        weights = xp.where(allowed, weights, xp.zeros_like(weights))
    return weights, xp.squeeze(xp.log(total) + largest, axis=-1)


_operation = Operation("attention_weights", forward, backward, prepare)


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
    arrays, settings = checked(
        q, k, None, mask=mask, bias=bias, causal=causal, q_offset=q_offset, window=window, key_lengths=key_lengths,
        segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, kernel=kernel,
    )  # fmt: skip
    return _operation.call(arrays, {"settings": settings}, backend)
