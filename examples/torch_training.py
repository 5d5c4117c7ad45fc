"""Train a torch model whose transformer blocks are polyattn's: it learns to say a row of digits backwards.

    python examples/torch_training.py
    python examples/torch_training.py --autocast --checkpoint --compile inductor --workers 2
    python examples/torch_training.py --backend numpy

The loop is an ordinary one of torch's: parameters, optimiser, autocast, activation checkpointing, torch.compile and
DataLoader workers are torch's own. The blocks' gradients are those of polyattn's backward, wherever it computes them.
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
    """Rows of random digits, each made from its number, so that it does not matter which worker makes it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(DIGITS, (LENGTH,), generator=torch.Generator().manual_seed(index))


class Reverser(nn.Module):
    """Digits and their positions, two blocks of polyattn's, and for each place the digit that belongs there."""

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
    """Return how many of the digits of new rows are right after the training."""
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
    parser.add_argument("--backend", default="torch", help="who computes the blocks (%(default)s)")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16 where that is enough")
    parser.add_argument("--checkpoint", action="store_true", help="keep no activations of a block, compute them again")
    parser.add_argument("--compile", metavar="BACKEND", help="torch.compile it: inductor, aot_eager, …")
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
