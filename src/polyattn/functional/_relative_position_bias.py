"""T5's relative position bias, read from a learnt table by the distance of key and query."""

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

    with the positions :math:`p_j = j` of keys and :math:`p_i = i + \mathtt{q\_offset}` of queries. Each short
    distance has its own bucket; longer distances share buckets on a logarithmic scale, and the last bucket holds all
    distances from ``max_distance`` on and some shorter ones. The bias is computed tile by tile. The gradient
    ``bias`` of :func:`polyattn.functional.attention_backward` is that of the table.

    Parameters
    ----------
    table : floating array (buckets, H)
        The value of each bucket for each query head, of the library of q. −inf excludes a pair.
    bidirectional : bool
        If True, keys after the query use the second half of the buckets, as in an encoder. If False, they use the
        bucket of distance 0, as in a decoder, where a causal mask excludes them.
    max_distance : int
        The distance from which all distances share the last bucket.

    Returns
    -------
    RelativePositionBias
        A small object that holds the table itself, not a copy.

    Raises
    ------
    BackendMismatchError, DTypeError, ShapeError
        If ``table`` is no floating array of two axes, has fewer than 2 buckets, or, if bidirectional, fewer than 4
        or an odd number. The attention call raises ShapeError if the number of heads is not that of the queries.
    ArgumentError
        If ``max_distance`` is not longer than the distances with their own bucket.

    Notes
    -----
    Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer" (2020),
    section 2.1. The bounds of the buckets are computed in integers, so that they do not depend on a library's
    rounding. T5 itself uses ``scale=1``.

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
