"""T5's relative positions: what makes the bias that attention reads from a table by distance."""

from __future__ import annotations

from ..backend import Array
from ..errors import ArgumentError, ShapeError
from ..kernels import RelativePositionBias
from ..kernels._static import concrete
from ._checks import expect_floating, shown

__all__ = ["relative_position_bias"]


def relative_position_bias(
    table: Array, *, bidirectional: bool = True, max_distance: int = 128
) -> RelativePositionBias:
    r"""Return T5's learnt bias by relative position, for the argument ``bias`` of :func:`polyattn.attention`.

    .. math:: \mathrm{bias}_{hij} = \mathrm{table}[\mathrm{bucket}(p_j - p_i), h]

    with the positions :math:`p_j = j` of keys and :math:`p_i = i + \mathtt{q\_offset}` of queries. Each of the near
    distances has a bucket of its own; the buckets of the others widen with the logarithm, and the last holds all
    from ``max_distance`` on and some before. It is computed tile by tile; the gradient of ``bias`` that
    :func:`polyattn.functional.attention_backward` gives is the table's.

    Parameters
    ----------
    table : floating array (buckets, H)
        The value of every bucket for every head of the queries, of the library of q. −inf excludes.
    bidirectional : bool
        Whether keys after the query have the second half of the buckets, as in an encoder; else they have the
        bucket of distance 0, as in a decoder, where causality excludes them.
    max_distance : int
        Where the buckets end.

    Returns
    -------
    RelativePositionBias
        A small object that holds the table itself, not a copy.

    Raises
    ------
    BackendMismatchError, DTypeError, ShapeError
        If ``table`` is no floating array of two axes, has fewer than 2 buckets, or, bidirectional, fewer than 4 or
        an odd number. A number of heads that is not the queries' is a ShapeError of the call.
    ArgumentError
        If ``max_distance`` is not beyond the near distances.

    Notes
    -----
    Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer" (2020),
    section 2.1. Where a bucket ends is computed in integers, so that no library rounds it otherwise. T5 itself
    attends with ``scale=1``.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> q, table = np.zeros((1, 3, 4)), np.array([[0.0], [1.0], [2.0], [3.0]])
    >>> pa.attention_weights(q, q, bias=pa.relative_position_bias(table, max_distance=2)).round(2)
    array([[[0.02, 0.49, 0.49],
            [0.11, 0.04, 0.84],
            [0.42, 0.42, 0.16]]])
    """
    expect_floating(table=table)
    least = 4 if bidirectional else 2
    if table.ndim != 2 or table.shape[0] < least or (bidirectional and table.shape[0] % 2):
        even = "an even number of buckets, 4" if bidirectional else "buckets, 2"
        raise ShapeError(f"table: expected (buckets, heads) with {even} or more, got {tuple(table.shape)}")
    near = table.shape[0] // (4 if bidirectional else 2)
    if not isinstance(max_distance, int) or isinstance(max_distance, bool) or not near < max_distance < 2**29:
        raise ArgumentError(
            f"max_distance: expected an integer above {near} and below 2**29, got {shown(max_distance)}"
        )
    return RelativePositionBias(concrete(table.shape[0]), bool(bidirectional), concrete(max_distance), table)
