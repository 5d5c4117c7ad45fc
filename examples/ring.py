"""Train one attention layer on a sequence that several processes share: each has a part of the positions.

    torchrun --nproc-per-node 2 examples/ring.py
    torchrun --nproc-per-node 8 examples/ring.py --positions 1000000 --heads 8 --width 512   # GPUs with NCCL

The task: copy the row that has the marked position to every later one. It needs attention over the whole sequence,
wherever the mark is. With CUDA each process uses the device of its LOCAL_RANK and NCCL, else the CPU and gloo. The last
lines compare result and gradients with those of one process, if the sequence is short enough for that.
"""

import argparse
import os

import torch
from torch import Tensor, distributed, nn

import polyattn as pa
from polyattn.distributed.torch import attention, positions, shard, unshard
from polyattn.interop.torch import to_module

LAYOUT = "zigzag"  # balances causal work


class Layer(nn.Module):
    """Causal self-attention: the projections see their own rows, and attention sees the shards of all ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = to_module(pa.Projection(width, 3 * width, backend="torch", seed=1))
        self.out = to_module(pa.Projection(width, width, backend="torch", seed=2))

    def forward(self, x: Tensor, shared: bool = True) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for y in self.qkv(x).chunk(3, dim=-1))
        y = attention(q, k, v, causal=True, layout=LAYOUT) if shared else pa.attention(q, k, v, causal=True)
        return self.out(y.transpose(-2, -3).flatten(-2))


def batch(step: int, n: int, width: int) -> tuple[Tensor, Tensor]:
    """Return a sequence and its targets, the same on every rank; a real program would load only its own positions."""
    rng = torch.Generator().manual_seed(step)
    x = torch.randn(1, n, width, generator=rng)
    mark = int(torch.randint(n // 4, (), generator=rng))
    x[..., 0] = 0.0
    x[:, mark, 0] = 8.0
    target = torch.zeros_like(x)
    target[:, mark:] = x[:, mark : mark + 1]
    return x, target


def train(model: Layer, options: argparse.Namespace, device: torch.device) -> list[float]:
    """Return the loss of each step, over all positions."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(options.steps):
        x, target = (shard(y, layout=LAYOUT).to(device) for y in batch(step, options.positions, options.width))
        loss = (model(x) - target).square().sum() / (options.positions * options.width)
        optimiser.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # each rank has the contribution of its positions
            distributed.all_reduce(parameter.grad)
        optimiser.step()
        distributed.all_reduce(loss := loss.detach())
        losses.append(float(loss))
    return losses


def difference(model: Layer, options: argparse.Namespace, device: torch.device) -> float:
    """Return the largest difference of a result from that of one process, relative to its largest number."""
    x, _ = batch(-1, options.positions, options.width)
    with torch.no_grad():
        together = unshard(model(shard(x, layout=LAYOUT).to(device)), layout=LAYOUT)
        alone = model(x.to(device), shared=False)
    return float((together - alone).abs().max() / alone.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo")
    rank, count = distributed.get_rank(), distributed.get_world_size()
    model = Layer(options.width, options.heads).to(device)
    losses = train(model, options, device)
    if rank == 0:
        mine = len(positions(options.positions, layout=LAYOUT))
        print(
            f"{count} processes, {mine} of {options.positions} positions each; loss {losses[0]:.3f} → {losses[-1]:.3f}"
        )
    if options.positions <= 2**14:
        error = difference(model, options, device)
        if rank == 0:
            print(f"the result differs from that of one process by {error:.1e}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
