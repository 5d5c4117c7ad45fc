"""The attention weights, for inspection: an array with one number for each pair of query and key."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array, Backend
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
from ._arguments import checked_options, checked_sizes, make_problem
from ._attention import with_head
from ._dispatch import Operation, run

__all__ = ["attention_weights"]


class Saved(NamedTuple):
    """The arrays and the problem that the backward needs."""

    q: Array
    k: Array
    problem: Problem


def forward(
    backend: Backend, q: Array, k: Array, *, kernel: str | None = None, **arguments: Any
) -> tuple[Array, Saved]:
    """Return softmax(scores) with excluded weights exactly zero."""
    xp, problem = backend.namespace(), make_problem(backend, q, backend.device_of(q), **arguments)
    if problem.sizes.empty:
        weights = xp.zeros(problem.sizes.scores, dtype=q.dtype, device=problem.native_device)
    else:
        q_, k_ = widen(xp, with_head(q)), widen(xp, with_head(k))

        def found(units: Units | None) -> Array:
            weights, _ = _weights(attention_scores(q_, repeat_heads(k_, problem), problem, units), problem)
            return expand(xp, cast(xp, weights, q.dtype), problem.sizes.scores)

        weights = backend.cond(
            fits(q_, k_, None, problem), lambda: found(None), lambda: found(row_units(q_, k_, problem))
        )
    return weights[0, ...] if q.ndim == k.ndim == 2 else weights, Saved(q, k, problem)


def backward(backend: Backend, dweights: Array, saved: Saved) -> AttentionGrads:
    """Return the gradients through the softmax and the scores; there are no values."""
    xp, problem = backend.namespace(), saved.problem
    q, k = with_head(saved.q), with_head(saved.k)
    if problem.sizes.empty:
        zeros = (None if x is None else xp.zeros_like(x) for x in (problem.bias_array, problem.sinks))
        return AttentionGrads(xp.zeros_like(saved.q), xp.zeros_like(saved.k), None, *zeros)
    q_, k_ = widen(xp, q), widen(xp, repeat_heads(k, problem))
    dweights = xp.reshape(widen(xp, dweights), problem.sizes.scores)

    def found(units: Units | None) -> AttentionGrads:
        x = attention_scores(q_, k_, problem, units)
        weights, rows = _weights(x, problem)
        none = xp.equal(weights, 0)
        shift = -xp.sum(xp.where(none, xp.zeros_like(dweights), weights * dweights), axis=-1)
        dscores = weights * (dweights + shift[..., None])
        dq, dk, dbias = scores_backward(dscores, q_, k_, x.capped, x.allowed, problem)
        grads = (unbroadcast(xp, dq, q_.shape), sum_heads(dk, k, problem), None, dbias)
        return in_dtypes(problem, q, k, None, grads, rows._replace(shift=shift))

    grads = backend.cond(fits(q_, k_, None, problem), lambda: found(None), lambda: found(row_units(q_, k_, problem)))
    dq, dk = (xp.reshape(dx, x.shape) for dx, x in ((grads.q, saved.q), (grads.k, saved.k)))
    return grads._replace(q=dq, k=dk)


def _weights(x: Scores, problem: Problem) -> tuple[Array, Rows]:
    """Return the softmax, exactly zero where excluded, and the row statistics."""
    xp = problem.xp
    exp, total, largest = exponentials(x, problem)
    weights = exp / nonzero(xp, total)
    if x.allowed is not None:
        weights = xp.where(x.allowed, weights, xp.zeros_like(weights))
    largest, log_total = (xp.squeeze(y, axis=-1) for y in (largest, xp.log(total)))
    return weights, Rows(largest, log_total, xp.zeros_like(largest), x.units)


OPERATION = Operation("attention_weights", forward, backward)


def attention_weights(
    q: Array, k: Array, *, mask: Array | None = None, bias: Array | None = None, causal: bool = False,
    q_offset: int | Array | None = None, window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Array | None = None, segment_ids: tuple[Array, Array] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Array | None = None, dropout: float = 0.0,
    seed: int | Array | None = None, backend: str | None = None, kernel: str | None = None,
) -> Array:  # fmt: skip
    """Return the weights that :func:`attention` gives to each key, ``(…, H, n_q, n_k)``, before dropout.

    The arguments are those of :func:`attention`; dropout, seed and kernel are accepted and have no effect.
    Each row sums to one, or to less with sinks. Excluded weights and rows without an allowed key are zero.

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
