"""The attention weights themselves: for looking at. They hold one number for each pair of query and key."""

from __future__ import annotations

from typing import Any

from ..backend import Array, Backend, Place
from ..kernels import AttentionGrads, Problem, cast, expand, unbroadcast, widen
from ..kernels._plain import (
    Rows,
    Scores,
    attention_scores,
    exponentials,
    in_dtypes,
    nonzero,
    repeat_heads,
    scores_backward,
    sum_heads,
)
from ..kernels._units import Units, fits, row_units
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

        def found(units: Units | None) -> Array:
            weights, _ = _weights(attention_scores(q_, repeat_heads(k_, problem), problem, units), problem)
            return expand(xp, cast(xp, weights, q.dtype), problem.sizes.scores)

        weights = backend.cond(
            fits(q_, k_, None, problem), lambda: found(None), lambda: found(row_units(q_, k_, problem))
        )
    return weights[0, ...] if q.ndim == k.ndim == 2 else weights, (q, k, *rest)


def backward(backend: Backend, dweights: Array, saved: tuple[Any, ...], *, settings: Settings) -> tuple[Any, ...]:
    """Reverse the softmax and the scores."""
    (q, k, _, bias, sinks, *rest), xp = saved, backend.namespace()
    problem = make_problem(Place(backend, settings.device), saved, settings)
    if problem.sizes.empty:
        zeros = (None if x is None else xp.zeros_like(x) for x in (q, k, None, bias, sinks))
        return (*zeros, *(None for _ in rest))
    q_heads, k_heads = (x if x.ndim > 2 else x[None, ...] for x in (q, k))
    q_, k_ = widen(xp, q_heads), widen(xp, repeat_heads(k_heads, problem))
    dweights = xp.reshape(widen(xp, dweights), problem.sizes.scores)

    def found(units: Units | None) -> AttentionGrads:
        x = attention_scores(q_, k_, problem, units)
        weights, rows = _weights(x, problem)
        none = xp.equal(weights, 0)
        shift = -xp.sum(xp.where(none, xp.zeros_like(dweights), weights * dweights), axis=-1)
        dscores = weights * (dweights + shift[..., None])
        dq, dk, dbias = scores_backward(dscores, q_, k_, x.capped, x.allowed, problem)
        grads = (unbroadcast(xp, dq, q_.shape), sum_heads(dk, k_heads, problem), None, dbias)
        return in_dtypes(problem, q_heads, k_heads, None, grads, rows._replace(shift=shift))

    dq, dk, _, dbias, dsinks = backend.cond(
        fits(q_, k_, None, problem), lambda: found(None), lambda: found(row_units(q_, k_, problem))
    )
    return (xp.reshape(dq, q.shape), xp.reshape(dk, k.shape), None, dbias, dsinks, *(None for _ in rest))


def _weights(x: Scores, problem: Problem) -> tuple[Array, Rows]:
    """Return the softmax, exactly zero where excluded, and what its rows were divided by."""
    xp = problem.xp
    exp, total, largest = exponentials(x, problem)
    weights = exp / nonzero(xp, total)
    if x.allowed is not None:
        weights = xp.where(x.allowed, weights, xp.zeros_like(weights))
    largest, log_total = (xp.squeeze(y, axis=-1) for y in (largest, xp.log(total)))
    return weights, Rows(largest, log_total, xp.zeros_like(largest), x.units)


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
