"""Joining attention over disjoint sets of keys: exact, and associative."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from ..backend import Array
from ..errors import ArgumentError
from ..kernels import RowStatistics, cast, merge, statistics_of_lse, wide, widen
from ._operation import embark, expect_arrays, expect_floating, expect_one_dtype, expect_shape, shown

__all__ = ["attention_merge"]


def attention_merge(
    parts: Sequence[tuple[Array, Array | RowStatistics]],
) -> tuple[Array, Any]:
    """Join partial results of attention over disjoint key sets into the result over all of them.

    Parameters
    ----------
    parts : sequence of (out (…, n_q, d_v), lse (…, n_q)) or of (out, RowStatistics)
        Results and ``cache.lse`` or ``cache.row_statistics`` of :func:`attention_forward`, for the same queries. The
        second loses no digit where scores are large. Sinks belong in one part only.

    Returns
    -------
    out, lse : array
        ``out`` in the parts' dtype, ``lse`` in float32 or float64. Parts that attended to nothing count for nothing.
        Where every part came with its row statistics, these of the whole stand in the place of ``lse``.

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
    arrays: dict[str, Array] = {}
    for i, part in enumerate(parts):
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ArgumentError(f"parts[{i}]: expected a pair (out, lse), got {type(part).__name__}")
        arrays |= {f"parts[{i}] {name}": x for name, x in _named(*part).items()}
    expect_arrays(**arrays)
    outs = {name: x for name, x in arrays.items() if name.endswith(" out")}
    expect_one_dtype(**outs)
    expect_floating(**{name: x for name, x in arrays.items() if name not in outs})
    shape = tuple(parts[0][0].shape)
    for name, x in arrays.items():
        expect_shape(name, x, shape if name in outs else shape[:-1])
    trip = embark(arrays)
    xp, native = trip.place.backend.namespace(), iter(trip.arrays)
    dtype = wide(xp, next(iter(trip.arrays)).dtype)  # type: ignore[union-attr]  # every array is there

    def statistics_of(given: Array | RowStatistics) -> RowStatistics:
        if isinstance(given, RowStatistics):
            return RowStatistics(*(cast(xp, next(native), dtype) for _ in given))
        return statistics_of_lse(xp, cast(xp, next(native), dtype))

    pairs = [(widen(xp, next(native)), statistics_of(given)) for _, given in parts]
    out, statistics = reduce(lambda a, b: merge(xp, a, b), pairs)
    out = trip.back(cast(xp, out, trip.arrays[0].dtype), "out")  # type: ignore[union-attr]
    if all(isinstance(given, RowStatistics) for _, given in parts):
        return out, RowStatistics(*(trip.back(x, "row_statistics") for x in statistics))
    return out, trip.back(statistics.lse, "lse")


def _named(out: Array, given: Array | RowStatistics) -> dict[str, Array]:
    """Return the arrays of a part by name."""
    return {"out": out} | (given._asdict() if isinstance(given, RowStatistics) else {"lse": given})
