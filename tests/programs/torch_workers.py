"""Data made by polyattn in a DataLoader's workers, on two backends. Run by ``backends/torch/test_pipelines.py``."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import polyattn as pa

N, COUNT = 128, 6


class Attended(Dataset):
    """Arrays that attention and a layer have gone over, on NumPy and on torch."""

    def __init__(self):
        self.layers = [pa.MultiHeadAttention(N, 4, backend=backend) for backend in ("numpy", "torch")]

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        x = np.random.default_rng(index).standard_normal((2, N, N), dtype=np.float32)
        out = [layer(pa.attention(x, x, x, causal=True, backend=layer.backend)) for layer in self.layers]
        return np.stack(out), pa.functional.softmax(torch.from_numpy(x))


def collate(items):
    """Put items together, by way of polyattn once more."""
    out, weights = ([item[i] for item in items] for i in (0, 1))
    return pa.functional.gelu(torch.from_numpy(np.stack(out))), torch.stack(weights)


def main():
    data = Attended()
    want = collate([data[i] for i in range(COUNT)])  # the parent has threads of its own by now
    for _ in range(2):
        loader = DataLoader(data, 2, collate_fn=collate, num_workers=2, multiprocessing_context="fork", timeout=60)
        got = (torch.cat(parts) for parts in zip(*loader, strict=True))
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y)
    print("as in the parent")


if __name__ == "__main__":
    main()
