"""Train a torch model with polyattn's transformer blocks to reverse a sequence of digits.

    python examples/torch_training.py
    python examples/torch_training.py --autocast --checkpoint --compile inductor --workers 2
    python examples/torch_training.py --backend numpy

The training loop is torch's: parameters, optimiser, autocast, activation checkpointing, torch.compile and DataLoader
workers. polyattn's backward computes the gradients of the blocks, on any backend.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import polyattn as pa
from polyattn.interop.torch import to_module

LENGTH, DIGITS, WIDTH, HEADS, BLOCKS = 6, 10, 32, 4, 2


class Rows(Dataset[Tensor]):
    """Rows of random digits. The index of a row is its seed, so that every worker makes the same row."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(DIGITS, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Reverser(nn.Module):
    """Embeddings of digits and positions, two polyattn blocks, and a classifier for each position."""

    def __init__(self, backend: str = "torch", checkpointing: bool = False) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.digits, self.places = nn.Embedding(DIGITS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        blocks = (pa.TransformerBlock(WIDTH, HEADS, 2 * WIDTH, backend=backend, seed=seed) for seed in range(BLOCKS))
        self.blocks = nn.ModuleList(to_module(block) for block in blocks)
        self.norm, self.classify = to_module(pa.LayerNorm(WIDTH, backend=backend)), nn.Linear(WIDTH, DIGITS)

    def forward(self, digits: Tensor) -> Tensor:
        x = self.digits(digits) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits: Tensor = self.classify(self.norm(x))
        return logits


def train(options: argparse.Namespace) -> float:
    """Train, and return the fraction of correct digits in unseen rows."""
    torch.manual_seed(options.seed)
    model = Reverser(options.backend, options.checkpoint)
    step_model = torch.compile(model, backend=options.compile, fullgraph=True) if options.compile else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = Rows(options.steps * options.batch)
    loader = DataLoader(rows, options.batch, num_workers=options.workers, multiprocessing_context=options.start)
    for step, batch in enumerate(loader):
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            logits = step_model(batch)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch.flip(1).flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")
    fresh = torch.stack([Rows(len(rows) + 500)[len(rows) + i] for i in range(500)])
    with torch.no_grad():
        return float((model(fresh).argmax(-1) == fresh.flip(1)).float().mean())


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="torch", help="the backend of the blocks (%(default)s)")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16 where autocast allows it")
    parser.add_argument("--checkpoint", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--compile", metavar="BACKEND", help="use torch.compile: inductor, aot_eager, …")
    parser.add_argument("--workers", type=int, default=0, help="processes that make the rows")
    parser.add_argument("--start", choices=["fork", "spawn"], help="how the workers are started")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    right = train(options)
    print(f"{right:.1%} of the digits right after {time.perf_counter() - began:.1f} s")
    return right


if __name__ == "__main__":
    main()
