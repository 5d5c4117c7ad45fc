"""Train polyattn's layers in two processes, with torch's DistributedDataParallel on gloo.

    python examples/torch_ddp.py

Each process has half of every batch, and DDP averages the gradients. The result equals that of one process with whole
batches; the last line prints the difference.
"""

import argparse
import os
import tempfile

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import polyattn as pa
from polyattn.interop.torch import to_module

BATCH, LENGTH, WIDTH = 8, 6, 32


def make_model(backend: str) -> nn.Module:
    return nn.Sequential(
        to_module(pa.TransformerBlock(WIDTH, 4, backend=backend, seed=1)),
        to_module(pa.Projection(WIDTH, WIDTH, backend=backend, seed=2)),
    )


def train(model: nn.Module, steps: int, share: slice) -> None:
    """Train on a share of each batch: the block learns to reverse a sequence of vectors."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))[share]
        optimiser.zero_grad()
        (model(x) - x.flip(1)).square().mean().backward()
        optimiser.step()


def work(rank: int, processes: int, meeting: str, result: str, options: argparse.Namespace) -> None:
    """Run one of the processes; the first one saves the parameters."""
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)
    torch.set_num_threads(1)
    model = make_model(options.backend)
    each = BATCH // processes
    train(DistributedDataParallel(model), options.steps, slice(rank * each, (rank + 1) * each))
    if rank == 0:
        torch.save(model.state_dict(), result)
    distributed.destroy_process_group()


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="torch", help="the backend of the layers (%(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        meeting, result = os.path.join(folder, "meeting"), os.path.join(folder, "learnt.pt")
        torch.multiprocessing.spawn(work, (options.processes, meeting, result, options), options.processes)
        together: dict[str, Tensor] = torch.load(result)
    alone = make_model(options.backend)
    train(alone, options.steps, slice(None))
    difference = max(float((x - together[name]).abs().max()) for name, x in alone.state_dict().items())
    print(f"{options.processes} processes and one differ by {difference:.1e} after {options.steps} steps")
    return difference


if __name__ == "__main__":
    main()
