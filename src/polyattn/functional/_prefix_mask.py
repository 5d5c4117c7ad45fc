"""The attention mask of a prefix language model."""

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

    A query may attend to the keys of the prefix, ``j < length``, and to the keys up to its own position,
    ``j ≤ i + q_offset``: every query sees the whole prefix, and attention is causal after it. Leave ``causal`` False,
    since it would exclude later keys of the prefix.

    Parameters
    ----------
    length : int or integers
        The number of keys in the prefix. An array has one for each batch entry, and broadcasts to the axes before
        the heads; its values are read at once, so it must not be traced.

    Returns
    -------
    PrefixMask
        A small object; ``&`` with another structured mask allows what both allow. A compiler compiles a new program
        for each new length.

    Raises
    ------
    DTypeError, ArgumentError
        If a length is no integer, is negative, or cannot be read. The attention call raises ShapeError if the
        lengths do not fit its batch.

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
    """Return the lengths in a flat tuple, and their shape."""
    host = values_of("length", length)
    if host.dtype.kind not in "iu":
        raise DTypeError(f"length: expected an integer or integers, got {host.dtype}")
    lengths = tuple(int(x) for x in host.reshape(-1))
    if any(x < 0 for x in lengths):
        raise ArgumentError(f"length: expected lengths that are not negative, got {min(lengths)}")
    return tuple(min(x, 2**29) for x in lengths), tuple(host.shape)
