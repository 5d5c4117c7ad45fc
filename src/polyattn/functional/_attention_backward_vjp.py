"""The backward of attention's backward, for second derivatives. The formulas are in ``kernels/_backward_vjp.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..backend import Array, Cache, dtype_name
from ..kernels import cast
from ..kernels._backward_vjp import backward_vjp
from ..kernels._jvp import Tangents
from ._attention import Saved, with_head
from ._attention_jvp import compiled, in_order, with_heads
from ._dispatch import expect_cache, to_home, upstream

__all__ = ["AttentionBackwardGrads", "attention_backward_vjp"]


class AttentionBackwardGrads(NamedTuple):
    """The gradients of the arguments of :func:`attention_backward`; None for arguments that are absent."""

    dout: Array
    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None
    dlse: Array | None


def attention_backward_vjp(
    cotangents: Sequence[Array | None], dout: Array, cache: Cache, dlse: Array | None = None
) -> AttentionBackwardGrads:
    r"""Return the gradients of :func:`attention_backward`'s arguments from those of its results, in linear memory.

    Let a scalar depend on ``grads = attention_backward(dout, cache, dlse)``, as a penalty on the gradients does.
    ``cotangents`` are the gradients of the scalar with respect to ``grads``; the result is its gradients with respect
    to dout, dlse and the inputs of the forward, on which the backward depends through ``cache``.

    Parameters
    ----------
    cotangents : AttentionGrads, or a tuple of arrays or None in its order (q, k, v, bias, sinks)
        For each gradient, an array of its shape and dtype, of the inputs' library. None means zero; trailing
        entries may be omitted.
    dout : array (…, H, n_q, d_v)
        The argument of :func:`attention_backward`.
    cache : Cache
        From :func:`attention_forward`.
    dlse : array (…, H, n_q), optional
        The argument of :func:`attention_backward`.

    Returns
    -------
    AttentionBackwardGrads
        ``dout``, ``q``, ``k``, ``v``, ``bias``, ``sinks``, ``dlse``: each in the shape and dtype of its
        argument, with sums in at least float32. ``dlse`` is None if no dlse was passed. The gradients of a row that
        may attend to nothing are zero; an excluded pair does not affect any result.

    Raises
    ------
    ArgumentError, ShapeError, DTypeError, BackendMismatchError
        If a cotangent, dout or dlse differs from its counterpart in shape, dtype or library, or if ``cache`` is of
        another operation.

    Notes
    -----
    The gradients are :math:`\nabla L` of :math:`L = \langle\mathrm{dout}, o\rangle +
    \langle\mathrm{dlse}, \mathrm{lse}\rangle`. Their inner product with cotangents u is the derivative of L along
    u. Hence the gradient of dout is the tangent of the result along u, that of dlse is the tangent of the log-sum-exp
    (both as in :func:`polyattn.attention_jvp`), and those of the inputs are :math:`(\nabla\nabla L)\, u`, the
    derivative of the backward along u. With P, S, o as there and :math:`C = dO\, v^\top + \delta`,
    :math:`\delta = \mathrm{dlse} - \mathrm{rowsum}(dO \odot o)`,

    .. math::

        \dot P &= P \odot (\dot S - \dot{\mathrm{lse}}), &
        \dot C &= dO\, \dot v^\top - \mathrm{rowsum}(dO \odot \dot o), \\
        \dot{dS} &= \dot P \odot C + P \odot \dot C, &
        \dot{dV} &= \dot P^\top dO, \\
        \dot{dQ} &= \mathrm{scale} \cdot (\dot{dS}\, k + dS\, \dot k), &
        \dot{dK} &= \mathrm{scale} \cdot (\dot{dS}^\top q + dS^\top \dot q),

    without the factors of softcap, bias, sinks and dropout.

    Examples
    --------
    The gradient of the squared norm of dq:

    >>> import numpy as np, polyattn as pa
    >>> q, k, v = np.ones((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> out, cache = pa.attention_forward(q, k, v)
    >>> grads = pa.attention_backward(np.ones_like(out), cache)
    >>> second = pa.attention_backward_vjp((2 * grads.q,), np.ones_like(out), cache)
    >>> second.v.round(3)
    array([[-0.25],
           [ 0.25]])
    """
    expect_cache(cache, "attention")
    saved: Saved = cache.saved
    bias, sinks = saved.problem.bias_array, saved.problem.sinks
    inputs = {"q": saved.q, "k": saved.k, "v": saved.v, "bias": bias, "sinks": sinks}
    given = in_order(cotangents, "cotangents", inputs)
    moved = Tangents(*(
        None if x is None else upstream(x, tuple(like.shape), dtype_name(like.dtype), cache, name)
        for (name, x), like in zip(given.items(), inputs.values(), strict=True)
    ))  # fmt: skip
    dout = upstream(dout, cache.y_shape, cache.y_dtype, cache, "dout")
    if dlse is not None:
        like = saved.statistics.log_total
        dlse = upstream(dlse, tuple(like.shape), dtype_name(like.dtype), cache, "dlse")
    native = cache.place.backend
    with native.scope():
        second = compiled(_second, native, saved)(moved, dout, dlse)
    return AttentionBackwardGrads(**to_home(second._asdict(), cache))


def _second(saved: Saved, cotangents: Tangents, dout: Array, dlse: Array | None) -> AttentionBackwardGrads:
    """Return all gradients, each in the shape and dtype of its argument."""
    problem = saved.problem
    xp, rows = problem.xp, problem.sizes.scores[:-1]
    x, dlse_ = saved.with_heads(), None if dlse is None else xp.reshape(dlse, rows)
    of_dout, of_dlse, of = backward_vjp(
        with_heads(cotangents), with_head(dout), dlse_, x.q, x.k, x.v, x.out, x.statistics, problem
    )
    pairs = ((of.q, saved.q), (of.k, saved.k), (of.v, saved.v))
    of_q, of_k, of_v = (xp.reshape(dx, y.shape) for dx, y in pairs)
    of_dlse = None if dlse is None else cast(xp, xp.reshape(of_dlse, dlse.shape), dlse.dtype)
    of_dout = cast(xp, xp.reshape(of_dout, dout.shape), dout.dtype)
    return AttentionBackwardGrads(of_dout, of_q, of_k, of_v, of.bias, of.sinks, of_dlse)
