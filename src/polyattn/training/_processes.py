"""The processes that share a training run: one alone, or those that torchrun started.

Each process computes the gradients of its share of a batch, and gets the mean over the whole batch. All have the same
parameters and optimiser state; the first one writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..conversion import to_backend
from ..distributed._gradients import Gradients
from ..errors import CheckpointError
from ._config import OptionError
from ._samples import Pairs

__all__ = ["Processes", "processes"]

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the variables of torchrun


class Processes(NamedTuple):
    """The processes of a run; this one is ``rank``."""

    rank: int = 0
    size: int = 1
    ranks: Any = None
    """The group of torch.distributed; None for a process alone."""

    @property
    def first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether no other process shares the run."""
        return self.size == 1

    @property
    def what(self) -> str:
        """The processes in words."""
        return "" if self.alone else f"{self.size} processes"

    def expect_samples(self, batch: int) -> None:
        """Require a sample for each process."""
        if batch < self.size:
            raise OptionError(f"--batch: expected at least one sample for each of {self.size} processes, got {batch}")

    def expect_same_step(self, step: int) -> None:
        """Require that all processes begin at one step: each read the checkpoint itself, perhaps not the same one."""
        if self.ranks is None:
            return
        import torch

        steps: list[Any] = [None] * self.size
        with self.ranks.watched():
            torch.distributed.all_gather_object(steps, step, group=self.ranks.group)
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"--resume: the processes read checkpoints of different steps, {', '.join(map(str, steps))} by rank; "
                "give all of them the same folder, and no other process that trains in it"
            )

    def share(self, pairs: Pairs) -> tuple[Pairs, float]:
        """Return this process's samples of a batch, and their part of it; at least one sample, whose part may be 0."""
        count = len(pairs[0])
        start, stop = (count * rank // self.size for rank in (self.rank, self.rank + 1))
        x, y = (array[start : max(stop, start + 1)] if stop > start else array[:1] for array in pairs)
        return (x, y), (stop - start) / count

    def gradients(
        self, function: Callable[..., Gradients], params: dict[str, Array], x: Array, y: Array, part: float,
        place: Callable[[np.ndarray[Any, Any]], Array],
    ) -> Gradients:  # fmt: skip
        """Return the means over the batch, of which x and y are this process's ``part``."""
        return self.mean(function(params, x, y), part, place)

    def mean(self, found: Gradients, part: float, place: Callable[[np.ndarray[Any, Any]], Array]) -> Gradients:
        """Return the means over the batch, from those of each process's samples, in one collective.

        ``place`` returns an array on the backend, in the dtype of the run.
        """
        if self.ranks is None:
            return found
        import torch

        arrays = [found.loss, *found.grads.values()]
        tensors = [to_backend(x, "torch", "cpu") for x in arrays]
        wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        flat = torch.cat([x.reshape(-1).to(wide) for x in tensors]) * part
        with self.ranks.watched():
            torch.distributed.all_reduce(flat, group=self.ranks.group)
        pieces = flat.split([x.numel() for x in tensors])
        loss, *grads = (place(y.reshape(x.shape).numpy()) for x, y in zip(tensors, pieces, strict=True))
        return Gradients(loss, dict(zip(found.grads, grads, strict=True)))


@contextmanager
def processes(environment: Mapping[str, str] = os.environ) -> Iterator[Processes]:
    """Return the processes of this run: those of the launcher's variables, which meet here, or one alone."""
    size = int(environment.get("WORLD_SIZE", "1")) if all(name in environment for name in LAUNCHER) else 1
    if size == 1:
        yield Processes()
        return
    import torch

    from ..distributed.torch._transfer import Ranks

    torch.distributed.init_process_group("gloo")
    try:
        ranks = Ranks.of(None)
        yield Processes(ranks.rank, ranks.size, ranks)
    finally:
        torch.distributed.destroy_process_group()
