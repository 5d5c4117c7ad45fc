"""The shards of a tensor: cutting this rank's positions, and putting those of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from ...errors import ShapeError
from .._block import Span
from .._layout import Layout, lengths_of, pieces_of
from ._transfer import Ranks

__all__ = ["in_order", "positions", "shard", "unshard"]

Tensor = Any


def positions(n: int, *, group: Any = None, layout: Layout = "contiguous", device: Any = None) -> Tensor:
    """Return the positions that this rank has of n, as the ranks share them as evenly as possible.

    Parameters
    ----------
    n : int
        The length of the sequence.
    group : ProcessGroup or DeviceMesh, optional
        As in :func:`attention`.
    layout : "contiguous" or "zigzag"
        As in :func:`attention`.
    device : optional
        Of the result.

    Returns
    -------
    Tensor
        int64, in the order in which :func:`shard` has them; for rotary embeddings, for instance.
    """
    ranks = Ranks.of(group)
    spans = pieces_of(lengths_of(n, ranks.size, layout), layout)[ranks.rank]
    return torch.cat([torch.arange(span.start, span.start + span.length, device=device) for span in spans])


def shard(x: Tensor, *, axis: int = -2, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """Return this rank's positions of a tensor that every rank has.

    Parameters
    ----------
    x : Tensor
        The whole tensor.
    axis : int
        The sequence axis.
    group, layout
        As in :func:`attention`.

    Returns
    -------
    Tensor
        A copy, differentiable.
    """
    expect_axis(x, axis)
    here = positions(x.shape[axis], group=group, layout=layout, device=x.device)
    return x.index_select(axis, here)


def unshard(x: Tensor, *, axis: int = -2, group: Any = None, layout: Layout = "contiguous") -> Tensor:
    """Return the whole tensor on every rank, from the shards of all ranks: the reverse of :func:`shard`.

    Parameters
    ----------
    x : Tensor
        This rank's positions; the numbers may differ from rank to rank.
    axis : int
        The sequence axis.
    group, layout
        As in :func:`attention`.

    Returns
    -------
    Tensor
        In the order of positions, without a gradient.
    """
    expect_axis(x, axis)
    ranks, x = Ranks.of(group), x.detach().movedim(axis, 0).contiguous()
    with ranks.watched():
        counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(ranks.size)]
        distributed.all_gather(counts, torch.tensor([len(x)], device=x.device), group=ranks.group)
        lengths = [int(count) for count in counts]
        padded = x.new_zeros((max(lengths), *x.shape[1:]))
        padded[: len(x)] = x
        shards = [torch.empty_like(padded) for _ in lengths]
        distributed.all_gather(shards, padded, group=ranks.group)
    pieces = pieces_of(lengths, layout)
    return in_order([part[:n] for part, n in zip(shards, lengths, strict=True)], pieces, 0).movedim(0, axis)


def expect_axis(x: Tensor, axis: int) -> None:
    """Require that a tensor has that axis."""
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"axis: expected one of the {x.ndim} axes of x, got {axis}")


def in_order(shards: Sequence[Tensor], pieces: Sequence[tuple[Span, ...]], axis: int) -> Tensor:
    """Return the pieces of all shards in the order of positions."""
    placed = [
        (span.start, part)
        for spans, shard in zip(pieces, shards, strict=True)
        for span, part in zip(spans, shard.split([span.length for span in spans], dim=axis), strict=True)
    ]
    return torch.cat([part for _, part in sorted(placed, key=lambda pair: pair[0])], dim=axis)
