"""Attention: the public function, its forward and its backward. The formulas are the kernels' (``kernels/``)."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

from ..backend import Array, Backend, Cache, Place, dtype_name
from ..conversion import move
from ..kernels import (
    GENERIC,
    AttentionGrads,
    Kernel,
    Problem,
    RowStatistics,
    cast,
    choose,
    expand,
    named,
    statistics_of_lse,
    unbroadcast,
    unrounded,
    wide,
)
from ._arguments import Settings, checked_call, make_problem
from ._operation import Operation, expect_cache, homeward, upstream_of

__all__ = ["AttentionGrads", "attention", "attention_backward", "attention_forward"]


logger = logging.getLogger("polyattn")


def prepare(place: Place, arrays: tuple[Any, ...], static: dict[str, Any]) -> dict[str, Any]:
    """Choose the kernel, so that the backward runs in the same one."""
    settings: Settings = static["settings"]
    problem = make_problem(place, arrays, settings)
    kernel = kernel_for(problem, settings.kernel)
    logger.debug("attention %s on %s: kernel %s", problem.sizes.scores, place, kernel.name)
    return {"settings": settings._replace(kernel=kernel.name, device=place.device)}


def forward(backend: Backend, *arrays: Array, settings: Settings) -> tuple[Array, tuple[Any, ...]]:
    """Run the kernel's forward; save the arrays, out and the row statistics."""
    problem, (q, k, v) = _with_heads(backend, arrays, settings)
    if problem.sizes.empty:
        out, statistics = _empty_forward(q, problem)
    else:
        out, statistics = named(backend.kernels, settings.kernel or GENERIC.name).forward(q, k, v, problem)
    if all(x.ndim == 2 for x in arrays[:3]):
        out, statistics = out[0, ...], RowStatistics(*(x[0, ...] for x in statistics))
    return out, (*arrays, out, *statistics)


def backward(
    backend: Backend, dout: Array, saved: tuple[Any, ...], *, settings: Settings, dlse: Array | None = None
) -> tuple[Any, ...]:
    """Run the kernel's backward; a gradient for each array, None for the integers."""
    *arrays, out, largest, log_total = saved
    problem, (q, k, v) = _with_heads(backend, arrays, settings)
    statistics = RowStatistics(largest, log_total)
    if all(x.ndim == 2 for x in arrays[:3]):
        dout, out = dout[None, ...], out[None, ...]
        statistics = RowStatistics(*(x[None, ...] for x in statistics))
        dlse = None if dlse is None else dlse[None, ...]
    if problem.sizes.empty:
        grads = _empty_backward(dlse, q, k, v, problem)
    else:
        kernel = named(backend.kernels, settings.kernel or GENERIC.name)
        grads = kernel.backward(dout, dlse, q, k, v, out, statistics, problem)
    xp = backend.namespace()
    shaped = (xp.reshape(dx, x.shape) for dx, x in zip(grads[:3], arrays, strict=False))
    return (*shaped, *grads[3:], *(None for _ in arrays[5:]))


_operation = Operation("attention", forward, backward, prepare)


def attention(
    q: Array, k: Array, v: Array, *, mask: Array | None = None, bias: Array | None = None, causal: bool = False,
    q_offset: int | Array | None = None, window: tuple[int | None, int | None] | None = None,
    key_lengths: int | Array | None = None, segment_ids: tuple[Array, Array] | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Array | None = None, dropout: float = 0.0,
    seed: int | Array | None = None, backend: str | None = None, kernel: str | None = None,
) -> Array:  # fmt: skip
    r"""Let every query take a weighted mean of the values, weighted by its match with the keys.

    .. math:: o = \mathrm{softmax}\bigl(\mathrm{softcap}(q k^\top \cdot \mathrm{scale}) + \mathrm{bias}\bigr)\, v

    Parameters
    ----------
    q : array (…, H, n_q, d_k)
        Queries. Leading axes broadcast; two axes are one head. One floating dtype for q, k and v.
    k : array (…, H_kv, n_k, d_k)
        Keys; query head h reads key and value head h // (H / H_kv).
    v : array (…, H_kv, n_k, d_v)
        Values.
    mask : boolean array, optional
        True = may attend; broadcasts to (…, H, n_q, n_k). Or one with structure, of which no n_q × n_k numbers are
        made: :func:`polyattn.block_mask`, :func:`polyattn.prefix_mask`.
    bias : floating array, optional
        Added to the scaled and softcapped scores; broadcasts to (…, H, n_q, n_k). −inf excludes. Or one with
        structure: :func:`polyattn.alibi_bias`, :func:`polyattn.relative_position_bias`.
    causal : bool
        Query i stands at position ``q_offset + i`` and sees keys at positions up to its own.
    q_offset : int or integers, optional
        Position of the first query among the keys, for each batch entry if an array; the default
        n_k − n_q makes the queries the last positions. 0 aligns upper left. May be negative.
    window : (left, right), optional
        How far before and after its own position a query sees, inclusive; None is unbounded.
    key_lengths : int or integers, optional
        Keys at and past the length are excluded.
    segment_ids : (integers (…, n_q), integers (…, n_k)), optional
        Packed sequences: a query attends only to keys of its own id.
    scale : float, optional
        Default 1/√d_k.
    softcap : float, optional
        c · tanh(score / c) in place of the scaled score.
    sinks : floating array (H,), optional
        One more logit a head, which takes weight and gives no value.
    dropout : float
        Probability with which a weight is dropped; the others are divided by 1 − dropout.
    seed : int or 0-d integer array, optional
        Which weights are dropped is a pure function of the seed and the position, on every library.
    backend : str, optional
        Where to compute; the strongest selection.
    kernel : str, optional
        Force a kernel by name.

    Returns
    -------
    array (…, H, n_q, d_v)
        In the inputs' dtype, library and device. Scores, softmax and sums are in float32 at least.
        A query that may attend to nothing gives zeros. What stands at an excluded key, NaN included,
        does not reach the result.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If shapes, dtypes or values do not fit; a mask that is not boolean among them.
    BackendMismatchError
        If the arrays are not of one library and device, or may not go where the selection sends them.
    UnknownBackendError, BackendUnavailableError, KernelUnsupportedError
        If the backend or kernel that was asked for is unknown or cannot be used.

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
    arrays, settings = checked_call(
        q, k, v, mask=mask, bias=bias, causal=causal, q_offset=q_offset, window=window, key_lengths=key_lengths,
        segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, kernel=kernel,
    )  # fmt: skip
    return _operation.call(arrays, {"settings": settings}, backend)


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
    loss of digits, as the two numbers whose sum it is: the largest score, and log Σ exp(score − largest).
    """
    arrays, settings = checked_call(
        q, k, v, mask=mask, bias=bias, causal=causal, q_offset=q_offset, window=window, key_lengths=key_lengths,
        segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, kernel=kernel,
    )  # fmt: skip
    out, cache = _operation.record(arrays, {"settings": settings}, backend)
    with cache.place.backend.scope():
        statistics = unrounded_of(cache.place.backend, cache.arrays, dict(cache.static)["settings"])
        lse = statistics.lse
    statistics = RowStatistics(*(move(x, cache.home, name="row_statistics") for x in statistics))
    return out, replace(cache, lse=move(lse, cache.home, name="lse"), row_statistics=statistics)


def attention_backward(dout: Array, cache: Cache, dlse: Array | None = None) -> AttentionGrads:
    """Return the gradients of q, k, v, bias and sinks, each in its argument's shape and dtype.

    Parameters
    ----------
    dout : array (…, H, n_q, d_v)
        Gradient of the result, in its dtype and of the inputs' library.
    cache : Cache
        From :func:`attention_forward`.
    dlse : array (…, H, n_q), optional
        Gradient of ``cache.lse``, where that is used as a second result.

    Notes
    -----
    With P the weights and O the result: dV = Pᵀ dO, dP = dO Vᵀ, dS = P ⊙ (dP − rowsum(dO ⊙ O) + dlse),
    dQ = dS K · scale, dK = dSᵀ Q · scale.
    """
    expect_cache(cache, "attention")
    more = {}
    if dlse is not None:
        like = cache.arrays[-1]
        more["dlse"] = upstream_of(tuple(like.shape), dtype_name(like.dtype), dlse, cache, "dlse")
    grads = _operation.reverse(dout, cache, name="dout", **more)
    return AttentionGrads(*homeward(grads[:5], cache, AttentionGrads))


def unrounded_of(backend: Backend, saved: tuple[Any, ...], settings: Settings) -> RowStatistics:
    """Return the row statistics of a forward, with all their digits whatever kernel it was."""
    *arrays, _, largest, log_total = saved
    statistics, kernel = RowStatistics(largest, log_total), named(backend.kernels, settings.kernel or GENERIC.name)
    problem, (q, k, _) = _with_heads(backend, arrays, settings)
    if problem.sizes.empty:
        return statistics
    xp, shape, rows = problem.xp, largest.shape, problem.sizes.scores[:-1]
    with_head = RowStatistics(*(xp.reshape(x, rows) for x in statistics))
    return RowStatistics(*(xp.reshape(x, shape) for x in unrounded(kernel, q, k, with_head, problem)))


def kernel_for(problem: Problem, name: str | None) -> Kernel:
    """Return the kernel that computes a problem."""
    # Features of length zero are legal, but no fast kernel need know them.
    odd = name is None and 0 in (problem.sizes.d_k, problem.sizes.d_v)
    return GENERIC if odd else choose(problem.backend.kernels, problem, name)


def _with_heads(backend: Backend, arrays: Any, settings: Settings) -> tuple[Problem, list[Array]]:
    """Return the problem, and q, k and v with a head axis each."""
    problem = make_problem(Place(backend, settings.device), tuple(arrays), settings)
    return problem, [x[None, ...] if x.ndim == 2 else x for x in arrays[:3]]


def _empty_forward(q: Array, problem: Problem) -> tuple[Array, RowStatistics]:
    """Answer a problem without scores: zeros, and the statistics of an empty sum or of the sink alone."""
    xp, rows = problem.xp, problem.sizes.scores[:-1]
    dtype, device = wide(xp, q.dtype), problem.native_device
    out = xp.zeros((*rows, problem.sizes.d_v), dtype=q.dtype, device=device)
    lse = xp.full(rows, -math.inf, dtype=dtype, device=device)
    if problem.sinks is not None:
        lse = expand(xp, cast(xp, problem.sinks, dtype)[:, None], rows)
    return out, statistics_of_lse(xp, lse)


def _empty_backward(dlse: Array | None, q: Array, k: Array, v: Array, problem: Problem) -> AttentionGrads:
    """Answer with zeros; only a sink still moves lse."""
    xp = problem.xp
    dbias, dsinks = (None if x is None else xp.zeros_like(x) for x in (problem.bias_array, problem.sinks))
    if dsinks is not None and dlse is not None:
        dsinks = cast(xp, unbroadcast(xp, xp.sum(dlse, axis=-1), dsinks.shape), dsinks.dtype)
    return AttentionGrads(xp.zeros_like(q), xp.zeros_like(k), xp.zeros_like(v), dbias, dsinks)
