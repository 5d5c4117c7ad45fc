"""Merging attention over disjoint sets of keys: exact and associative."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from ..backend import Array
from ..errors import ArgumentError
from ..kernels import RowStatistics, cast, merge, statistics_of_lse, wide, widen
from ._checks import expect_arrays, expect_floating, expect_one_dtype, expect_shape, shown
from ._dispatch import to_compute_device

__all__ = ["attention_merge"]


def attention_merge(
    parts: Sequence[tuple[Array, Array | RowStatistics]],
) -> tuple[Array, Any]:
    """Merge partial results of attention over disjoint sets of keys into the result over all keys.

    Parameters
    ----------
    parts : sequence of (out (…, n_q, d_v), lse (…, n_q)) or of (out, RowStatistics)
        Results and ``cache.lse`` or ``cache.row_statistics`` of :func:`attention_forward`, for the same queries. The
        row statistics lose no digits where scores are large. Only one part may have sinks.

    Returns
    -------
    out, lse : array
        ``out`` in the parts' dtype, ``lse`` in float32 or float64. A part without an allowed key does not change
        the result. If every part has row statistics, the second result is the row statistics over all keys.

    Raises
    ------
    ArgumentError, ShapeError, DTypeError, BackendMismatchError
        If ``parts`` is empty, or the parts differ in shape, dtype or library.

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
    placed = to_compute_device(arrays)
    xp, native = placed.place.backend.namespace(), placed.arrays
    dtype = wide(xp, native["parts[0] out"].dtype)

    def native_part(i: int, given: Array | RowStatistics) -> tuple[Array, RowStatistics]:
        out, *rows = (native[f"parts[{i}] {name}"] for name in _named(None, given))
        rows = [cast(xp, x, dtype) for x in rows]
        return widen(xp, out), RowStatistics(*rows) if len(rows) == 2 else statistics_of_lse(xp, *rows)

    pairs = [native_part(i, given) for i, (_, given) in enumerate(parts)]
    out, statistics = reduce(lambda a, b: merge(xp, a, b), pairs)
    out = placed.to_input_device(cast(xp, out, native["parts[0] out"].dtype), "out")
    if all(isinstance(given, RowStatistics) for _, given in parts):
        return out, RowStatistics(*(placed.to_input_device(x, "row_statistics") for x in statistics))
    return out, placed.to_input_device(statistics.lse, "lse")


def _named(out: Array, given: Array | RowStatistics) -> dict[str, Array]:
    """Return the arrays of a part by name."""
    return {"out": out} | (given._asdict() if isinstance(given, RowStatistics) else {"lse": given})
