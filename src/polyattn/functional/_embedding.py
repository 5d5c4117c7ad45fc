"""Embedding lookup, and its backward, which sums the gradients of each row."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache, dtype_name
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels import cast, widen
from ..registry import owner
from ._checks import expect_arrays, expect_floating, is_integer
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._range import apply_linear

__all__ = ["EmbeddingGrads", "embedding", "embedding_backward", "embedding_forward"]


class EmbeddingGrads(NamedTuple):
    """The gradients of :func:`embedding`; None for the integer indices."""

    indices: None
    weight: Array


class Saved(NamedTuple):
    """What the backward needs."""

    indices: Array
    inside: Array | None
    rows: int


def forward(backend: Backend, indices: Array, weight: Array, *, count: int, in_range: bool) -> tuple[Array, Saved]:
    """Return weight[indices], with zeros for indices out of range unless ``in_range`` says that there are none."""
    xp = backend.namespace()
    # Not every library indexes with every integer dtype, or compares unsigned integers.
    signed = cast(xp, indices, xp.int64 if dtype_name(indices.dtype).endswith("64") else xp.int32)
    index, inside = xp.reshape(signed, (math.prod(indices.shape),)), None  # (n,)
    if not in_range:
        inside = xp.logical_and(xp.greater_equal(index, 0), xp.less(index, count))  # (n,)
        index = xp.where(inside, index, xp.zeros_like(index))
    rows = xp.take(weight, index, axis=0)  # (n, features)
    if inside is not None:
        rows = xp.where(inside[:, None], rows, xp.zeros_like(rows))
    return xp.reshape(rows, (*indices.shape, weight.shape[1])), Saved(index, inside, count)


def backward(backend: Backend, dy: Array, saved: Saved) -> EmbeddingGrads:
    """Return for each row of the table the sum of dy over the indices that selected it, in float32 at least."""
    xp, (index, inside, count) = backend.namespace(), saved
    features = dy.shape[-1]
    drows = xp.reshape(widen(xp, dy), (index.shape[0], features))  # (n, features)
    if inside is not None:
        drows = xp.where(inside[:, None], drows, xp.zeros_like(drows))
    # rows = weight[index]
    device = backend.native_device(backend.device_of(dy))
    table = xp.zeros((count, features), dtype=drows.dtype, device=device)
    dweight = apply_linear(backend, lambda drows: backend.index_add(table, index, drows), drows)
    return EmbeddingGrads(None, cast(xp, dweight, dy.dtype))  # (count, features)


OPERATION = Operation("embedding", forward, backward)


def embedding(indices: Array, weight: Array) -> Array:
    """Return rows of a table: y[…] = weight[indices[…]].

    Parameters
    ----------
    indices : array (…)
        Integers from 0 to below ``count``; negative ones do not count from the end.
    weight : array (count, features)
        Floating, with at least one row.

    Returns
    -------
    array (…, features)
        Of the dtype of ``weight``.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If ``weight`` is no floating table or ``indices`` are not integers; if an index is out of range
        (checked if the indices are readable on the host; otherwise such an index gives zeros, and no row has a
        gradient from it).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.embedding(np.array([2, 0, 2]), np.array([[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]))
    array([[2. , 2.5],
           [0. , 0.5],
           [2. , 2.5]])
    """
    return run(OPERATION, *_check(indices, weight))


def embedding_forward(indices: Array, weight: Array) -> tuple[Array, Cache]:
    """Return ``(embedding(indices, weight), cache)``."""
    return run_with_cache(OPERATION, *_check(indices, weight))


def embedding_backward(dy: Array, cache: Cache) -> EmbeddingGrads:
    """Return for each row of the table the sum of dy over the indices that selected it."""
    return run_backward(OPERATION, dy, cache, EmbeddingGrads)


def _check(indices: Array, weight: Array) -> tuple[dict[str, Array], dict[str, Any]]:
    expect_arrays(weight=weight)
    expect_floating(weight=weight)
    if weight.ndim != 2 or weight.shape[0] == 0:
        raise ShapeError(f"weight: expected (count, features) with at least one row, got {tuple(weight.shape)}")
    count = weight.shape[0]
    return {"indices": indices, "weight": weight}, {"count": count, "in_range": checked_indices(indices, count)}


def checked_indices(indices: Array, count: int, name: str = "indices") -> bool:
    """Return whether the indices could be read and so are in range; raise if they are out of range or no integers."""
    if not hasattr(indices, "dtype") or not is_integer(indices):
        raise DTypeError(f"{name}: expected integers, got {dtype_name(getattr(indices, 'dtype', type(indices)))}")
    backend = owner(indices, name)
    if not backend.state(indices).readable:
        return False
    values = backend.to_numpy(indices)
    wrong = values[(values < 0) | (values >= count)]
    if wrong.size:
        raise ArgumentError(f"{name}: expected integers in [0, {count}), got {int(wrong[0])}")
    return True
