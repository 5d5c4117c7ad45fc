"""What makes the mask of a prefix language model."""

from __future__ import annotations

from typing import Any

from ..backend import Array
from ..errors import ArgumentError, DTypeError
from ..kernels import PrefixMask
from ..kernels._static import concrete, constant_result
from ..registry import looks_like_array
from ._block_mask import values_of

__all__ = ["prefix_mask"]


def prefix_mask(length: int | Array) -> PrefixMask:
    """Return the mask of a prefix language model, for the argument ``mask`` of :func:`polyattn.attention`.

    A query sees the keys of the prefix, ``j < length``, and those at positions up to its own,
    ``j ≤ i + q_offset``: everything sees the whole prefix, and what follows it is causal. ``causal`` stays False,
    since it would exclude later keys of the prefix again.

    Parameters
    ----------
    length : int or integers
        How many keys the prefix has, for each batch entry if an array, whose shape broadcasts to the axes before the
        heads. It is read here and now: a traced array has no values yet.

    Returns
    -------
    PrefixMask
        A small object; ``&`` with another structured mask allows what both allow. Under a compiler, another length
        is another program.

    Raises
    ------
    DTypeError, ArgumentError
        If a length is no integer, is negative, or cannot be read. Lengths that do not fit the batch are a ShapeError
        of the call.

    Notes
    -----
    Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text transformer" (2020),
    figure 3.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> x = np.zeros((4, 8))
    >>> (pa.attention_weights(x, x, mask=pa.prefix_mask(2)) > 0).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    known = values_of("length", length) if looks_like_array(length) else concrete(length)
    return PrefixMask(*_checked(known))


@constant_result
def _checked(length: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths and the shape that they have."""
    host = values_of("length", length)
    if host.dtype.kind not in "iu":
        raise DTypeError(f"length: expected an integer or integers, got {host.dtype}")
    lengths = tuple(int(x) for x in host.reshape(-1))
    if any(x < 0 for x in lengths):
        raise ArgumentError(f"length: expected lengths that are not negative, got {min(lengths)}")
    return tuple(min(x, 2**29) for x in lengths), tuple(host.shape)
