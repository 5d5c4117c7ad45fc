"""The backward of attention's backward, for second derivatives. The formulas are ``kernels/_backward_vjp.py``'s."""

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
    """The gradients of what :func:`attention_backward` takes; None for what was not given."""

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

    For a scalar that is computed from ``grads = attention_backward(dout, cache, dlse)``, a penalty on the gradients
    for instance, ``cotangents`` are its gradients with respect to ``grads``; the result is its gradients with respect
    to dout, dlse and the inputs of the forward, everything that the backward depends on through ``cache`` included.

    Parameters
    ----------
    cotangents : AttentionGrads, or a tuple of arrays or None in its order (q, k, v, bias, sinks)
        For each gradient, an array of its shape and dtype, of the inputs' library; None, or leaving out the last
        ones, counts as zero.
    dout : array (…, H, n_q, d_v)
        What :func:`attention_backward` was given.
    cache : Cache
        From :func:`attention_forward`.
    dlse : array (…, H, n_q), optional
        What :func:`attention_backward` was given.

    Returns
    -------
    AttentionBackwardGrads
        ``dout``, ``q``, ``k``, ``v``, ``bias``, ``sinks``, ``dlse``: each in the shape and dtype of what it belongs
        to, with sums in float32 at least. ``dlse`` is None where none was given. A row that may attend to nothing
        gives zeros; what stands at an excluded key, or in a row for the keys that it excludes, reaches nothing.

    Raises
    ------
    ArgumentError, ShapeError, DTypeError, BackendMismatchError
        If a cotangent, dout or dlse is not like what it belongs to, or ``cache`` is of something else.

    Notes
    -----
    The gradients are :math:`\nabla L` of :math:`L = \langle\mathrm{dout}, o\rangle +
    \langle\mathrm{dlse}, \mathrm{lse}\rangle`. Contracted with cotangents u they are the derivative of L along u, so
    that the gradient of dout is the tangent of the result along u, that of dlse the tangent of the log-sum-exp (as
    :func:`polyattn.attention_jvp` gives them), and those of the inputs are :math:`(\nabla\nabla L)\, u`: the
    derivative of the backward's own lines along u. With P, S, o as there and :math:`C = dO\, v^\top + \delta`,
    :math:`\delta = \mathrm{dlse} - \mathrm{rowsum}(dO \odot o)`,

    .. math::

        \dot P &= P \odot (\dot S - \dot{\mathrm{lse}}), &
        \dot C &= dO\, \dot v^\top - \mathrm{rowsum}(dO \odot \dot o), \\
        \dot{dS} &= \dot P \odot C + P \odot \dot C, &
        \dot{dV} &= \dot P^\top dO, \\
        \dot{dQ} &= \mathrm{scale} \cdot (\dot{dS}\, k + dS\, \dot k), &
        \dot{dK} &= \mathrm{scale} \cdot (\dot{dS}^\top q + dS^\top \dot q),

    to which softcap, bias, sinks and dropout add their factors.

    Examples
    --------
    The gradient of the squared length of the queries' gradient:

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
    """Return the gradients of everything, in its shape and dtype."""
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
