"""Load the weights of a torch encoder into polyattn's layers, train them there, and load them back into torch.

The encoder is torch's ``nn.TransformerEncoder``. Its weights are converted to polyattn's blocks, on any backend, and
the outputs agree. The hand-written backward trains the blocks to compute running means over the rows. Then the weights
are converted back, and torch's encoder computes the running means.

    python examples/weights.py --backend numpy

Needs torch.
"""

import argparse
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from array_api_compat import array_namespace
from threadpoolctl import threadpool_limits

import polyattn as pa
from polyattn import functional as F
from polyattn.interop import weights

WIDTH, HEADS, HIDDEN, BLOCKS, ROWS = 16, 4, 32, 2, 12

Array = Any
Parameters = dict[str, Array]


def encoder() -> torch.nn.TransformerEncoder:
    """Return a torch encoder without dropout, so that outputs can be compared."""
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
    return torch.nn.TransformerEncoder(layer, BLOCKS, torch.nn.LayerNorm(WIDTH), enable_nested_tensor=False)


def our_layers() -> dict[str, pa.layers.Layer]:
    """Return the same layers of polyattn, under the names of torch's modules."""
    blocks = [pa.TransformerBlock(WIDTH, HEADS, HIDDEN, activation="relu") for _ in range(BLOCKS)]
    return {**{f"layers.{i}": block for i, block in enumerate(blocks)}, "norm": pa.LayerNorm(WIDTH)}


def forward(layers: dict[str, Any], x: Array) -> tuple[Array, dict[str, Any]]:
    """Apply the blocks with a causal mask, then the last norm."""
    caches: dict[str, Any] = {}
    for name, layer in layers.items():
        x, caches[name] = layer.forward(x, **({} if name == "norm" else {"causal": True}))
    return x, caches


def backward(layers: dict[str, Any], dy: Array, caches: dict[str, Any]) -> Parameters:
    """Call the backwards in reverse order; return the gradients of all parameters by name."""
    grads: Parameters = {}
    for name, layer in reversed(layers.items()):
        (dy, *_), of_layer = layer.backward(dy, caches[name])
        grads |= {f"{name}.{key}": gradient for key, gradient in of_layer.items()}
    return grads


def train(layers: dict[str, Any], steps: int, seed: int) -> list[float]:
    """Train the layers to compute running means; return the losses."""
    optimiser, rng, losses = pa.optim.AdamW(1e-2), np.random.default_rng(seed), []
    parameters = weights.parameters_of(layers)
    state = optimiser.init(parameters)
    for _ in range(steps):
        x = rng.standard_normal((32, ROWS, WIDTH), dtype=np.float32)
        y, caches = forward(layers, x)
        loss, cache = F.mse_loss_forward(y, running_means(x))
        dy = F.mse_loss_backward(array_namespace(loss).ones_like(loss), cache).prediction
        parameters, state = optimiser.update(backward(layers, dy, caches), state, parameters)
        weights.load(layers, parameters)
        losses.append(float(loss))
    return losses


def running_means(x: np.ndarray) -> np.ndarray:
    return np.cumsum(x, axis=1) / np.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


def of_torch(model: torch.nn.TransformerEncoder, x: np.ndarray) -> np.ndarray:
    hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)  # True excludes a pair in torch's modules
    return model(torch.from_numpy(x), mask=hidden, is_causal=True).detach().numpy()


def main(arguments: list[str] | None = None) -> tuple[list[float], float, float]:
    parser = argparse.ArgumentParser(description="Train a torch encoder by polyattn's backward.")
    parser.add_argument("--backend", help="default: POLYATTN_BACKEND, or numpy")
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    model, x = encoder(), np.random.default_rng(options.seed + 1).standard_normal((8, ROWS, WIDTH), dtype=np.float32)
    selection = pa.use_backend(options.backend) if options.backend else nullcontext()
    with selection, threadpool_limits(1):  # threads do not speed up matrices of this size
        layers = our_layers()
        weights.load(layers, weights.from_torch(model.state_dict(), layers))
        before = float(np.abs(forward(layers, x)[0] - of_torch(model, x)).max())
        losses = train(layers, options.steps, options.seed)
        state = weights.to_torch(weights.parameters_of(layers), layers)
        model.load_state_dict({name: pa.to_backend(value, "torch", "cpu") for name, value in state.items()})
        after = float(np.abs(forward(layers, x)[0] - of_torch(model, x)).max())
    learnt = float(np.mean((of_torch(model, x) - running_means(x)) ** 2))
    print(f"outputs differ by {before:.1e} before the training, and by {after:.1e} after it")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; of torch's encoder, on other rows: {learnt:.3f}")
    return losses, max(before, after), learnt


if __name__ == "__main__":
    try:
        main()
    except pa.PolyattnError as error:
        sys.exit(f"weights: {error}")
