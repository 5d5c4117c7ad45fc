"""Attention in forward mode: the result and its tangent. The formulas are in ``kernels/_jvp.py``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..backend import Array, Backend, Structure, dtype_name, flatten
from ..errors import ArgumentError
from ..kernels import cast, in_tiles_of
from ..kernels._jvp import Tangents, jvp
from ._arguments import checked_call
from ._attention import Saved, forward, row_statistics_of, with_head
from ._checks import expect_dtype, expect_shape, shown
from ._dispatch import to_compute_device

__all__ = ["attention_jvp"]


def attention_jvp(
    q: Array, k: Array, v: Array, tangents: Sequence[Array | None], *, mask: Array | None = None,
    bias: Array | None = None, causal: bool = False, q_offset: int | Array | None = None,
    window: tuple[int | None, int | None] | None = None, key_lengths: int | Array | None = None,
    segment_ids: tuple[Array, Array] | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: Array | None = None, dropout: float = 0.0, seed: int | Array | None = None, return_lse: bool = False,
    backend: str | None = None, kernel: str | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    r"""Return attention and its derivative along a direction: a Jacobian-vector product, in linear memory.

    With weights :math:`P = \exp(S - \mathrm{lse})`, scores :math:`S = \mathrm{softcap}(s) + \mathrm{bias}`,
    :math:`s = \mathrm{scale} \cdot q k^\top`, and a dot for a derivative along the tangents,

    .. math::

        \dot s &= \mathrm{scale} \cdot (\dot q k^\top + q \dot k^\top), &
        \dot S &= \mathrm{softcap}'(s) \odot \dot s + \dot{\mathrm{bias}}, \\
        \dot{\mathrm{lse}} &= \mathrm{rowsum}(P \odot \dot S) + p_0 \odot \dot{\mathrm{sinks}}, &
        \dot o &= (P \odot (\dot S - \dot{\mathrm{lse}}))\, v + P \dot v,

    where :math:`p_0` is the weight of the sink; dropout multiplies the weights in both terms of the last line.

    Parameters
    ----------
    q, k, v : array
        As in :func:`polyattn.attention`, which explains the other arguments too.
    tangents : tuple of arrays or None, in the order (q, k, v, bias, sinks)
        The tangent of each argument: an array of its shape and dtype. None means zero; trailing entries may be
        omitted. For a relative position bias, ``bias`` is the tangent of its table.
    return_lse : bool
        Whether to return the log-sum-exp and its derivative as well.
    backend, kernel : str, optional
        Where to compute, and the kernel of the forward. The derivative is computed tile by tile for every kernel.

    Returns
    -------
    out, out_dot : array (…, H, n_q, d_v)
        The result, and its derivative along the tangents: in the inputs' dtype, with sums in at least float32.
        The values of an excluded key, in the inputs or in the tangents, do not affect them.
    lse, lse_dot : array (…, H, n_q)
        With ``return_lse``: the log of Σ exp(score), in float32 or float64, and its derivative. In a row that may
        attend to nothing they are −inf and 0.

    Raises
    ------
    ArgumentError, ShapeError, DTypeError
        If a tangent differs from its argument in shape or dtype, or if its argument is absent; also as in
        :func:`polyattn.attention`.
    BackendMismatchError, UnknownBackendError, BackendUnavailableError, KernelUnsupportedError
        As in :func:`polyattn.attention`.

    Notes
    -----
    No library's graph is recorded: the results are constants to torch's autograd.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> q, k, v = np.ones((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> out, out_dot = pa.attention_jvp(q, k, v, (None, None, np.ones((2, 1))))
    >>> out, out_dot
    (array([[2.]]), array([[1.]]))
    """
    arrays, options = checked_call(
        q, k, v, mask=mask, bias=bias, causal=causal, q_offset=q_offset, window=window, key_lengths=key_lengths,
        segment_ids=segment_ids, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout, seed=seed, kernel=kernel,
    )  # fmt: skip
    given = in_order(tangents, "tangents", {name: arrays.get(name) for name in Tangents._fields})
    for name, x in given.items():
        if x is not None:
            like = arrays[name.removeprefix("tangents.")]
            expect_dtype(dtype_name(like.dtype), "its argument's", **{name: x})
            expect_shape(name, x, tuple(like.shape))
    placed = to_compute_device(arrays | given, backend)
    native, moved = placed.place.backend, Tangents(*(placed.arrays.pop(name) for name in given))
    with native.scope():
        out, saved = forward(native, **placed.arrays, **options)
        out_dot, lse_dot = compiled(_tangents, native, saved)(moved)
        lse = row_statistics_of(saved).lse if return_lse else None
    results = {"out": out, "out_dot": out_dot} | ({"lse": lse, "lse_dot": lse_dot} if return_lse else {})
    return tuple(placed.to_input_device(x, name) for name, x in results.items())


def in_order(given: Any, what: str, arguments: Mapping[str, Array | None]) -> dict[str, Array | None]:
    """Return the entry of each argument, None if omitted, by its name in error messages."""
    if not isinstance(given, tuple | list) or len(given) > len(arguments):
        raise ArgumentError(
            f"{what}: expected a tuple in the order ({', '.join(arguments)}), None for what is not given, got "
            + (f"{len(given)} entries" if isinstance(given, tuple | list) else shown(given))
        )
    entries = dict.fromkeys(arguments) | dict(zip(arguments, given, strict=False))
    for name, x in entries.items():
        if x is not None and arguments[name] is None:
            raise ArgumentError(
                f"{what}.{name}: expected None, since the call has no {name} of numbers, got {shown(x)}"
            )
    return {f"{what}.{name}": x for name, x in entries.items()}


def compiled(function: Callable[..., Any], native: Backend, saved: Saved) -> Callable[..., Any]:
    """Return ``function(saved, *more)`` for records ``more``, compiled where the library compiles.

    It computes in the tiles of the forward's kernel.
    A seed that fits in int32 becomes an array, so that a new seed does not compile again.
    """
    saved = saved._replace(problem=in_tiles_of(saved.kernel, saved.problem))
    if type(native).jit is Backend.jit:  # not cached: torch.compile warns about ``lru_cache``
        return functools.partial(function, saved)
    seed = saved.problem.seed
    if isinstance(seed, int) and -(2**31) <= seed < 2**31:
        xp, device = native.namespace(), saved.problem.native_device
        saved = saved._replace(problem=replace(saved.problem, seed=xp.asarray(seed, dtype=xp.int32, device=device)))
    arrays, structure = flatten(saved)
    return functools.partial(_compiled(function, native, structure), arrays)


@functools.lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], native: Backend, structure: Structure) -> Callable[..., Any]:
    """Return the function compiled for the static values in ``structure``."""

    def run(arrays: tuple[Array, ...], *more: Any) -> Any:
        return function(structure.build(arrays), *more)

    return native.jit(run)


def with_heads(moved: Tangents) -> Tangents:
    """Return the tangents, with a head axis in those of q, k and v."""
    q, k, v = (None if x is None else with_head(x) for x in (moved.q, moved.k, moved.v))
    return moved._replace(q=q, k=k, v=v)


def _tangents(saved: Saved, moved: Tangents) -> tuple[Array, Array]:
    """Return the tangents of out and lse, in the shapes and dtypes of out and lse."""
    x, lse, xp = saved.with_heads(), saved.statistics.log_total, saved.problem.xp
    result = jvp(x.q, x.k, x.v, with_heads(moved), x.out, x.statistics, x.problem)
    out_dot, lse_dot = xp.reshape(result.out_dot, saved.out.shape), xp.reshape(result.lse_dot, lse.shape)
    return cast(xp, out_dot, saved.out.dtype), cast(xp, lse_dot, lse.dtype)
