"""Block-sparse attention masks from a grid of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array
from ..errors import ArgumentError, DTypeError, ShapeError
from ..kernels import BlockMask
from ..kernels._static import concrete, constant_result
from ..registry import looks_like_array, owner
from ._checks import shown

__all__ = ["block_mask"]


def block_mask(blocks: Array, block_size: int | tuple[int, int]) -> BlockMask:
    """Return a mask of whole blocks, for the argument ``mask`` of :func:`polyattn.attention`.

    Query i may attend to key j where ``blocks[…, i // B, j // B]`` is True. Row i is the i-th query of the call,
    whatever ``q_offset`` is, as in any mask. Tiles without an allowed block are not computed.

    Parameters
    ----------
    blocks : boolean array (…, H, ⌈n_q / B⌉, ⌈n_k / B⌉)
        Of any library; axes before the last two may be 1 or left out. Its values are copied to the host at once, so
        it must not be traced; expand a traced array to an ordinary mask.
    block_size : int or pair of int
        B, or one size for the queries and one for the keys. The last blocks may be incomplete.

    Returns
    -------
    BlockMask
        A small object; ``&`` with another structured mask allows what both allow. A compiler compiles a new program
        for each new mask.

    Raises
    ------
    DTypeError, ShapeError, ArgumentError
        If ``blocks`` is not boolean, has fewer than two axes or cannot be read, or a size is no positive integer.
        The attention call raises ShapeError if the blocks do not fit its queries and keys.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> q, k = np.zeros((4, 8)), np.zeros((6, 8))
    >>> mask = pa.block_mask(np.array([[True, False], [True, True]]), (2, 3))
    >>> (pa.attention_weights(q, k, mask=mask) > 0).astype(int)
    array([[1, 1, 1, 0, 0, 0],
           [1, 1, 1, 0, 0, 0],
           [1, 1, 1, 1, 1, 1],
           [1, 1, 1, 1, 1, 1]])
    """
    known = values_of("blocks", blocks) if looks_like_array(blocks) else blocks
    return BlockMask(*_checked(known, concrete(block_size)))


@constant_result
def _checked(blocks: Any, block_size: Any) -> tuple[tuple[int, ...], bytes, tuple[int, int]]:
    """Return the shape of the grid, its blocks as packed bits, and the two block sizes."""
    host = values_of("blocks", blocks)
    if host.dtype != np.bool_:
        raise DTypeError(f"blocks: expected booleans, True = may attend, got {host.dtype}")
    if host.ndim < 2:
        raise ShapeError(f"blocks: expected (…, blocks of queries, blocks of keys), got {host.shape}")
    sides = tuple(block_size) if isinstance(block_size, tuple | list) else (block_size, block_size)
    if len(sides) != 2 or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise ArgumentError(f"block_size: expected a positive integer or two of them, got {shown(block_size)}")
    return tuple(host.shape), np.packbits(host).tobytes(), (sides[0], sides[1])


def values_of(name: str, x: Any) -> np.ndarray[Any, Any]:
    """Return a static argument, an array of any library or numbers, as a NumPy array."""
    if not looks_like_array(x):
        try:
            return np.asarray(x)
        except ValueError as error:
            raise ArgumentError(f"{name}: expected an array or numbers in even rows: {error}") from None
    backend = owner(x, name)
    reason = backend.state(x).captive
    if reason is not None:
        raise ArgumentError(f"{name}: expected values that are known before anything is computed; this array {reason}")
    return backend.to_numpy(x)
