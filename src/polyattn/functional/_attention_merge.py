"""Joining attention over disjoint sets of keys: exact, and associative."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from ..backend import Array
from ..errors import ArgumentError
from ..kernels import cast, merge, wide, widen
from ._checks import expect_arrays, expect_floating, expect_one_dtype, expect_shape, shown
from ._dispatch import to_compute_device

__all__ = ["attention_merge"]


def attention_merge(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Join partial results of attention over disjoint key sets into the result over all of them.

    Parameters
    ----------
    parts : sequence of (out (…, n_q, d_v), lse (…, n_q))
        Results and ``cache.lse`` of :func:`attention_forward`, for the same queries. Sinks belong in one part only.

    Returns
    -------
    out, lse : array
        ``out`` in the parts' dtype, ``lse`` in float32 or float64. Parts that attended to nothing count for nothing.

    Raises
    ------
    ArgumentError, ShapeError, DTypeError, BackendMismatchError
        If there is no part, or the parts differ in shape, dtype or library.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> q, k, v = np.ones((2, 4)), np.arange(12.0).reshape(3, 4), np.arange(6.0).reshape(3, 2)
    >>> whole = pa.attention(q, k, v)
    >>> halves = [pa.attention_forward(q, k[s], v[s]) for s in (slice(0, 1), slice(1, 3))]
    >>> out, lse = pa.attention_merge([(out, cache.lse) for out, cache in halves])
    >>> bool(np.allclose(out, whole))
    True
    """
    if not isinstance(parts, tuple | list) or not parts:
        raise ArgumentError(f"parts: expected a list of (out, lse), at least one, got {shown(parts)}")
    for i, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ArgumentError(f"parts[{i}]: expected a pair (out, lse), got {type(part).__name__}")
        expect_arrays(**{f"parts[{i}] out": part[0], f"parts[{i}] lse": part[1]})
    outs = {f"parts[{i}] out": part[0] for i, part in enumerate(parts)}
    lses = {f"parts[{i}] lse": part[1] for i, part in enumerate(parts)}
    expect_one_dtype(**outs)
    expect_floating(**lses)
    shape = tuple(parts[0][0].shape)
    for (name_out, out), (name_lse, lse) in zip(outs.items(), lses.items(), strict=True):
        expect_shape(name_out, out, shape)
        expect_shape(name_lse, lse, shape[:-1])
    placed = to_compute_device(outs | lses)
    native: tuple[Array, ...] = tuple(placed.arrays.values())
    xp, n = placed.place.backend.namespace(), len(parts)
    dtype = wide(xp, native[0].dtype)
    pairs = [(widen(xp, out), cast(xp, lse, dtype)) for out, lse in zip(native[:n], native[n:], strict=True)]
    out, lse = reduce(lambda a, b: merge(xp, a, b), pairs)
    out = cast(xp, out, native[0].dtype)
    return placed.to_input_device(out, "out"), placed.to_input_device(lse, "lse")
