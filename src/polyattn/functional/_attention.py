"""Attention: the public function, its forward and its backward. The formulas are in ``kernels/``."""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache, dtype_name
from ..kernels import (
    AttentionGrads,
    Kernel,
    Problem,
    RowStatistics,
    cast,
    choose,
    expand,
    holds,
    statistics_of_lse,
    unbroadcast,
    unrounded,
    wide,
)
from ._arguments import checked_call, make_problem
from ._dispatch import Operation, expect_cache, finish, run, run_backward, to_compute_device, upstream, wait

__all__ = ["AttentionGrads", "attention", "attention_backward", "attention_forward"]


logger = logging.getLogger("polyattn")


@holds("q", "k", "v", "out", "statistics", "problem")
class Saved(NamedTuple):
    """The arrays and static values that the backward needs, in the shapes of the call."""

    q: Array
    k: Array
    v: Array
    out: Array
    statistics: RowStatistics
    problem: Problem
    kernel: Kernel

    @property
    def kernel_name(self) -> str:
        """The name of the kernel that computed the forward."""
        return self.kernel.name

    def with_heads(self) -> Saved:
        """Return the record in the shapes of kernels, with a head axis."""
        if self.out.ndim > 2 and self.q.ndim == self.k.ndim == self.v.ndim == self.out.ndim:
            return self
        q, k, v, out = (with_head(x) for x in (self.q, self.k, self.v, self.out))
        statistics = self.statistics.reshaped(self.problem.xp, self.problem.sizes.scores[:-1])
        return self._replace(q=q, k=k, v=v, out=out, statistics=statistics)


def forward(
    backend: Backend, q: Array, k: Array, v: Array, *, kernel: str | None = None, **arguments: Any
) -> tuple[Array, Saved]:
    """Choose a kernel and run its forward."""
    problem = make_problem(backend, q, backend.device_of(q), **arguments)
    chosen = choose(backend.kernels, problem, kernel)
    scores = problem.sizes.scores
    logger.debug("attention %s on %s: kernel %s", scores, backend.name, chosen.name)
    compute = empty_forward if 0 in scores else chosen.forward
    out, statistics = compute(with_head(q), with_head(k), with_head(v), problem)
    if q.ndim == k.ndim == v.ndim == 2:
        out, statistics = out[0, ...], statistics.reshaped(problem.xp, out.shape[1:-1])
    return out, Saved(q, k, v, out, statistics, problem, chosen)


def backward(backend: Backend, dout: Array, saved: Saved, dlse: Array | None = None) -> AttentionGrads:
    """Run the backward of the kernel that computed the forward."""
    xp, problem, x = backend.namespace(), saved.problem, saved.with_heads()
    dlse = None if dlse is None else xp.reshape(dlse, problem.sizes.scores[:-1])
    compute = empty_backward if problem.sizes.empty else saved.kernel.backward
    grads = compute(with_head(dout), dlse, x.q, x.k, x.v, x.out, x.statistics, problem)
    dq, dk, dv = (
        xp.reshape(grads.q, saved.q.shape),
        xp.reshape(grads.k, saved.k.shape),
        xp.reshape(grads.v, saved.v.shape),
    )
    return grads._replace(q=dq, k=dk, v=dv)


def with_head(x: Array) -> Array:
    """Return queries, keys, values or results with a head axis."""
    return x[None, ...] if x.ndim == 2 else x


OPERATION = Operation("attention", forward, backward)


def attention(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, bias: Array | None = None, causal: bool = False,
    q_offset: int | Array | None = None, window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Array | None = None, segment_ids: tuple[Array, Array] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Array | None = None, dropout: float = 0.0,
    seed: int | Array | None = None, backend: str | None = None, kernel: str | None = None,
) -> Array:  # fmt: skip
    r"""Return, for each query, the mean of the values weighted by the softmax of its scores with the keys.

    .. math:: o = \mathrm{softmax}\bigl(\mathrm{softcap}(q k^\top \cdot \mathrm{scale}) + \mathrm{bias}\bigr)\, v

    Parameters
    ----------
    q : array (…, H, n_q, d_k)
        Queries. Leading axes broadcast; an array of two axes is one head. q, k and v have the same floating dtype.
    k : array (…, H_kv, n_k, d_k)
        Keys. Query head h uses key and value head h // (H / H_kv).
    v : array (…, H_kv, n_k, d_v)
        Values.
    mask : boolean array, optional
        True = may attend; broadcasts to (…, H, n_q, n_k). Or a structured mask, for which no n_q × n_k array is
        stored: :func:`polyattn.block_mask`, :func:`polyattn.prefix_mask`.
    bias : floating array, optional
        Added to the scaled and softcapped scores; broadcasts to (…, H, n_q, n_k). −inf excludes. Or a
        structured bias: :func:`polyattn.alibi_bias`, :func:`polyattn.relative_position_bias`.
    causal : bool
        Query i has position ``q_offset + i`` and sees the keys at positions up to its own.
    q_offset : int or integers, optional
        Position of the first query among the keys; an array has one for each batch entry. With the default
        n_k − n_q the queries are the last positions; with 0 the first. May be negative. In an array, positions
        beyond ±2²⁹ may count as ±2²⁹, which differs only with a window of at least that size.
    window : (left, right), optional
        How far before and after its own position a query sees, inclusive; None is unbounded.
    key_lengths : int or integers, optional
        Keys at and past the length are excluded.
    segment_ids : (integers (…, n_q), integers (…, n_k)), optional
        Packed sequences: a query attends only to keys with the same id.
    scale : float, optional
        Default 1/√d_k.
    softcap : float, optional
        Replaces the scaled score by c · tanh(score / c).
    sinks : floating array (H,), optional
        One more score for each head, which takes weight and has no value.
    dropout : float
        Probability that a weight is dropped; the others are divided by 1 − dropout.
    seed : int or 0-d integer array, optional
        Seed of the dropout mask, which is a pure function of the seed and the position, the same on every library.
    backend : str, optional
        Where to compute. Takes precedence over every other selection.
    kernel : str, optional
        Force a kernel by name.

    Returns
    -------
    array (…, H, n_q, d_v)
        In the inputs' dtype, library and device. Scores, softmax and sums are computed in at least float32.
        The result of a query that may attend to nothing is zero. The values of an excluded key, NaN included,
        do not affect the result.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If shapes, dtypes or values do not fit, or if the mask is not boolean.
    BackendMismatchError
        If the arrays are not of one library and device, or may not be moved to the selected place.
    UnknownBackendError, BackendUnavailableError, KernelUnsupportedError
        If the requested backend or kernel is unknown or cannot be used.

    Notes
    -----
    Vaswani et al., "Attention is all you need" (2017). Differentiable by torch and JAX on their own
    arrays; elsewhere use :func:`attention_forward` and :func:`attention_backward`.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> q, k, v = np.zeros((1, 2)), np.zeros((3, 2)), np.eye(3)
    >>> pa.attention(q, k, v, mask=np.array([True, True, False]))
    array([[0.5, 0.5, 0. ]])
    """
    arguments = checked_call(
        q, k, v, mask=mask, bias=bias, causal=causal, q_offset=q_offset, window=window, key_lengths=key_lengths,
        segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, kernel=kernel,
    )  # fmt: skip
    return run(OPERATION, *arguments, backend)


def attention_forward(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, bias: Array | None = None, causal: bool = False,
    q_offset: int | Array | None = None, window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Array | None = None, segment_ids: tuple[Array, Array] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Array | None = None, dropout: float = 0.0,
    seed: int | Array | None = None, backend: str | None = None, kernel: str | None = None,
) -> tuple[Array, Cache]:  # fmt: skip
    """Return ``(attention(q, k, v, …), cache)``.

    ``cache.lse`` (…, H, n_q) is the natural logarithm of each row's Σ exp(score), the sink included,
    in float32 or float64; −inf for a row that may attend to nothing. ``cache.row_statistics`` is the same without
    loss of digits, as two numbers: the largest score, and log Σ exp(score − largest). Their sum is ``cache.lse``.
    """
    arguments = checked_call(
        q, k, v, mask=mask, bias=bias, causal=causal, q_offset=q_offset, window=window, key_lengths=key_lengths,
        segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, kernel=kernel,
    )  # fmt: skip
    placed = to_compute_device(arguments.arrays, backend)
    with placed.place.backend.scope():
        out, saved = forward(placed.place.backend, **placed.arrays, **arguments.options)
        statistics = row_statistics_of(saved)
    wait((saved, statistics), placed.place, placed.home)  # all together, before any is moved
    statistics = RowStatistics(*[placed.to_input_device(x, "row_statistics") for x in statistics])
    return finish("attention", placed, out, saved, statistics)


def attention_backward(dout: Array, cache: Cache, dlse: Array | None = None) -> AttentionGrads:
    """Return the gradients of q, k, v, bias and sinks, each in its argument's shape and dtype.

    Parameters
    ----------
    dout : array (…, H, n_q, d_v)
        Gradient of the result, in the dtype of the result and the library of the inputs.
    cache : Cache
        From :func:`attention_forward`.
    dlse : array (…, H, n_q), optional
        Gradient of ``cache.lse``, if it is used as a second result.

    Notes
    -----
    With P the weights and O the result: dV = Pᵀ dO, dP = dO Vᵀ, dS = P ⊙ (dP − rowsum(dO ⊙ O) + dlse),
    dQ = dS K · scale, dK = dSᵀ Q · scale.
    """
    expect_cache(cache, "attention")
    if dlse is not None:
        like = cache.saved.statistics.log_total
        dlse = upstream(dlse, tuple(like.shape), dtype_name(like.dtype), cache, "dlse")
    return run_backward(OPERATION, dout, cache, AttentionGrads, name="dout", dlse=dlse)


def row_statistics_of(saved: Saved) -> RowStatistics:
    """Return the row statistics of a forward, without loss of digits for any kernel."""
    if saved.problem.sizes.empty:
        return saved.statistics
    x, shape = saved.with_heads(), saved.statistics.largest.shape
    return unrounded(saved.kernel, x.q, x.k, x.statistics, x.problem).reshaped(x.problem.xp, shape)


def empty_forward(q: Array, k: Array, v: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Return the result of a problem without scores: zeros, and the statistics of an empty sum or of the sink alone."""
    xp, rows = problem.xp, problem.sizes.scores[:-1]
    dtype, device = wide(xp, q.dtype), problem.native_device
    out = xp.zeros((*rows, problem.sizes.d_v), dtype=q.dtype, device=device)
    lse = xp.full(rows, -math.inf, dtype=dtype, device=device)
    if problem.sinks is not None:
        lse = expand(xp, cast(xp, problem.sinks, dtype)[:, None], rows)
    return out, statistics_of_lse(xp, lse)


def empty_backward(
    dout: Array, dlse: Array | None, q: Array, k: Array, v: Array, out: Array, statistics: RowStatistics,
    problem: Problem,
) -> AttentionGrads:  # fmt: skip
    """Return zero gradients; only that of the sinks may not be zero, through lse."""
    xp = problem.xp
    dbias, dsinks = (None if x is None else xp.zeros_like(x) for x in (problem.bias_array, problem.sinks))
    if dsinks is not None and dlse is not None:
        dsinks = cast(xp, unbroadcast(xp, xp.sum(dlse, axis=-1), dsinks.shape), dsinks.dtype)
        dsinks = xp.where(xp.equal(problem.sinks, -math.inf), xp.zeros_like(dsinks), dsinks)  # as if there were none
    return AttentionGrads(xp.zeros_like(q), xp.zeros_like(k), xp.zeros_like(v), dbias, dsinks)
