"""A layer of polyattn as a torch module under DDP, FSDP2 and torch.distributed.checkpoint, in two processes.

Prints as JSON how far the parameters are from those of one process that trains on whole batches, which of them are
sharded, and whether a checkpoint of two processes is read by two and by one bit for bit. With a folder as argument it
reads the checkpoint there in one process.
"""

import json
import os
import sys
import tempfile

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import polyattn as pa
from polyattn.interop.torch import to_module

STEPS = 4


def model(backend):
    return torch.nn.Sequential(
        to_module(pa.TransformerBlock(16, 4, seed=1, dtype="float64", backend=backend)),
        to_module(pa.Projection(16, 16, seed=2, dtype="float64", backend=backend)),
    )


def train(module, share):
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(STEPS):
        x = torch.randn(4, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))[share]
        optimiser.zero_grad()
        (module(x) - x.flip(1)).square().mean().backward()
        optimiser.step()
    return module


def whole(x):
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def difference(module, alone):
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    return max(float((whole(a) - b.detach()).abs().max()) for a, b in pairs if float(b.detach().abs().max()) > 1e-3)


def work(rank, folder, result):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    share, found = slice(2 * rank, 2 * rank + 2), {}
    for backend in ("torch", "numpy"):
        alone = train(model(backend), slice(None))
        ddp = train(DistributedDataParallel(model(backend)), share)
        found[f"ddp {backend}"] = difference(ddp, alone)
        sharded = model(backend)
        for part in (*sharded, sharded):
            fully_shard(part)
        train(sharded, share)
        found[f"fsdp {backend}"] = difference(sharded, alone)
        found[f"sharded {backend}"] = sum(isinstance(x, DTensor) for x in sharded.parameters())
        found["parameters"] = len(list(alone.parameters()))
    path = os.path.join(folder, "checkpoint")
    checkpoint.save({"model": sharded.state_dict()}, checkpoint_id=path)
    again = model("numpy")
    for part in (*again, again):
        fully_shard(part)
    state = {"model": again.state_dict()}
    checkpoint.load(state, checkpoint_id=path)
    again.load_state_dict(state["model"])
    pairs = zip(again.parameters(), sharded.parameters(), strict=True)
    found["read by two"] = all(torch.equal(whole(a), whole(b)) for a, b in pairs)
    torch.save({name: whole(x) for name, x in sharded.state_dict().items()}, os.path.join(folder, f"whole{rank}.pt"))
    distributed.barrier()
    if rank == 0:
        with open(result, "w") as file:
            json.dump(found, file)
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "found.json")
        torch.multiprocessing.spawn(work, (folder, result), 2)
        with open(result) as file:
            found = json.load(file)
        one = model("torch")
        state = {"model": one.state_dict()}
        checkpoint.load(state, checkpoint_id=os.path.join(folder, "checkpoint"), no_dist=True)
        one.load_state_dict(state["model"])
        expected = torch.load(os.path.join(folder, "whole0.pt"))
        found["read by one"] = all(torch.equal(x, expected[name]) for name, x in one.state_dict().items())
        print(json.dumps(found))
        sys.stdout.flush()
