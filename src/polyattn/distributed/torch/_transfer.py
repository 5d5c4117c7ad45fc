"""Messages between the ranks of a group, and the error where a rank was lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

# Its functions have the default group as a default argument. Imported later, as torch.optim does, they would keep that
# group alive after destroy_process_group, and one of its threads may then abort the process at its end.
import torch.distributed.nn
from torch import distributed

from ...errors import EngineError

__all__ = ["Ranks", "Transfer", "like"]

Tensor = Any


class Ranks(NamedTuple):
    """A process group, with the number of this process in it."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Return the ranks of a group, of a one-dimensional DeviceMesh, or of all processes for None."""
        if not (distributed.is_available() and distributed.is_initialized()):
            raise EngineError(
                "group: there is no process group; start the program with torchrun, and call "
                "torch.distributed.init_process_group first"
            )
        if isinstance(group, distributed.device_mesh.DeviceMesh):
            if group.ndim != 1:
                raise EngineError(
                    f"group: expected a mesh of one dimension, got {group.mesh_dim_names or group.ndim}; name the one "
                    "along which the sequence is shared, mesh['context']"
                )
            group = group.get_group()
        group = distributed.group.WORLD if group is None else group
        rank = distributed.get_rank(group)
        if rank < 0:
            raise EngineError("group: this process is not in the group; call attention only on the ranks of the group")
        return cls(group, rank, distributed.get_world_size(group))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise one error where a process was lost or did not answer; each transport raises another one."""
        try:
            yield
        except EngineError:
            raise
        except RuntimeError as cause:  # DistBackendError is one too
            reason = str(cause).strip().partition("\n")[0]
            raise EngineError(
                f"rank {self.rank} of {self.size}: another process of the group ended or did not answer ({reason}); "
                "end all processes, and start again from the last checkpoint"
            ) from cause

    def global_rank(self, rank: int) -> int:
        """Return the number of a rank of this group among all processes."""
        return distributed.get_global_rank(self.group, rank % self.size)  # type: ignore[no-any-return]  # torch is Any


class Transfer:
    """A message to the next rank and one from the previous rank, under way."""

    def __init__(self, ranks: Ranks, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Start to send tensors, and to receive into others. They must not change before :meth:`wait`."""
        self._ranks, self._sent, self._received = ranks, sent, received
        to, source = ranks.global_rank(ranks.rank + 1), ranks.global_rank(ranks.rank - 1)
        calls = [
            *((distributed.isend, x, to) for x in sent if x.numel()),
            *((distributed.irecv, x, source) for x in received if x.numel()),
        ]
        with ranks.watched():
            operations = [distributed.P2POp(call, x, peer, ranks.group) for call, x, peer in calls]
            self._works = distributed.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Sequence[Tensor]:
        """Return the tensors that were received."""
        with self._ranks.watched():
            for work in self._works:
                work.wait()
        return self._received


def like(x: Tensor, length: int, dtype: Any = None) -> Tensor:
    """Return an empty tensor with another length of the sequence axis, the second from the end."""
    shape = (*x.shape[:-2], length, x.shape[-1])
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
