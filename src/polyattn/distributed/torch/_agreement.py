"""The check before the first transfer of a call: all ranks have valid arguments that agree, or all raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import distributed

from ...errors import EngineError, PolyattnError
from ._transfer import Ranks

__all__ = ["agreed"]

T = TypeVar("T")
FAILED = b"failed"


def agreed(
    ranks: Ranks, device: Any, check: Callable[[], tuple[T, tuple[int, int], Mapping[str, Any]]]
) -> tuple[T, list[tuple[int, int]]]:
    """Return the result of ``check`` on this rank, and the numbers of queries and keys of every rank.

    ``check()`` returns its result, the two numbers of this rank, and what must be equal on all ranks. One collective
    with 24 bytes from each rank; only where something is wrong a second one carries the texts.

    Raises
    ------
    PolyattnError
        What ``check`` raised on this rank.
    EngineError
        On the other ranks if ``check`` raised somewhere, and on all ranks if they disagree.
    """
    failure = result = None
    lengths, said = (0, 0), {}
    try:
        result, lengths, found = check()
        said = {name: repr(value) for name, value in found.items()}
    except PolyattnError as error:
        failure = error
    digest = FAILED if failure else repr(said).encode()
    number = int.from_bytes(hashlib.blake2b(digest, digest_size=8).digest(), "big", signed=True)
    mine = torch.tensor([*lengths, number], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(ranks.size)]
    with ranks.watched():
        distributed.all_gather(everyone, mine, group=ranks.group)
        rows = torch.stack(everyone).tolist()
        if failure is None and len({row[2] for row in rows}) == 1:
            return result, [(n_q, n_k) for n_q, n_k, _ in rows]  # type: ignore[return-value]  # it did not fail
        texts: list[Any] = [None] * ranks.size
        distributed.all_gather_object(texts, (None if failure is None else str(failure), said), group=ranks.group)
    if failure is not None:
        raise failure
    raise EngineError(_difference(texts))


def _difference(texts: list[tuple[str | None, dict[str, str]]]) -> str:
    """Say what is wrong on which rank."""
    for rank, (failure, _) in enumerate(texts):
        if failure is not None:
            return f"rank {rank} refused its arguments, so no rank computes: {failure}"
    first = texts[0][1]
    for rank, (_, said) in enumerate(texts):
        for name in {**first, **said}:
            here, there = (known.get(name, "none") for known in (first, said))
            if here != there:
                return (
                    f"{name}: expected the same on all ranks, got {here} on rank 0 and {there} on rank {rank}; only "
                    "the lengths of the shards may differ"
                )
    raise AssertionError("the digests differ, but the texts are equal")
