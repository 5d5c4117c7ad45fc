"""Draw attention weights by head, the pairs that masks allow, the tiles of a long problem, and a learning curve.

A layer is trained to reverse words. Its attention weights on "POLYATTENTION" are drawn: each position has to attend to
the position at the same distance from the other end.

    python examples/pictures.py
    python examples/pictures.py --output pictures --backend torch

In a notebook the functions of ``polyattn.plot`` are enough: without ``axes`` or ``figure`` they create figures with
pyplot, which the notebook shows. Needs matplotlib: pip install "polyattn[plot]"
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from threadpoolctl import threadpool_limits

import polyattn as pa
from polyattn import functional as F
from polyattn import plot

WORD = "POLYATTENTION"
LETTERS, LENGTH, HEADS, BATCH = 26, len(WORD), 3, 32

Array = Any


def written(letters: np.ndarray) -> np.ndarray:
    """Return letters (batch, positions) as one-hot vectors of letter and position, (batch, positions, 39)."""
    places = np.broadcast_to(np.eye(LENGTH, dtype=np.float32), (*letters.shape, LENGTH))
    return np.concatenate([np.eye(LETTERS, dtype=np.float32)[letters], places], axis=-1)


def train(steps: int, seed: int) -> tuple[pa.MultiHeadAttention, list[float]]:
    """Train a layer to reverse words; return it and the loss of each step."""
    layer, rng, losses = pa.MultiHeadAttention(LETTERS + LENGTH, HEADS, seed=seed), np.random.default_rng(seed), []
    optimiser = pa.optim.AdamW(pa.optim.cosine(1e-2, total_steps=steps))
    state = optimiser.init(layer.parameters())
    for _ in range(steps):
        x = written(rng.integers(LETTERS, size=(BATCH, LENGTH)))
        y, cache = layer.forward(x)
        loss, loss_cache = F.mse_loss_forward(y, np.flip(x, axis=1))
        dy = F.mse_loss_backward(np.ones_like(loss), loss_cache).prediction
        _, grads = layer.backward(dy, cache)
        parameters, state = optimiser.update(grads, state, layer.parameters())
        layer.load_parameters(parameters)
        losses.append(float(loss))
    return layer, losses


def draw(weights: Array, losses: list[float]) -> dict[str, Figure]:
    """Return the pictures by name; the weights have the shape (heads, query positions, key positions)."""
    figures = {name: Figure(layout="constrained") for name in ("heads", "masks", "tiles", "training")}

    plot.attention_map(
        weights, queries=list(WORD[::-1]), keys=list(WORD), title="output letters (queries) and input letters (keys)",
        figure=figures["heads"],
    )  # fmt: skip

    figures["masks"].set_size_inches(13, 4.6)
    documents = np.repeat([0, 1, 2], [6, 4, 6])
    masks = {
        "causal": {"causal": True},
        "window": {"causal": True, "window": (4, None)},
        "packed documents": {"causal": True, "segment_ids": (documents, documents)},
    }
    for axes, (title, arguments) in zip(figures["masks"].subplots(1, 3), masks.items(), strict=True):
        plot.mask(16, 16, axes=axes, title=title, **arguments)

    figures["tiles"].set_size_inches(6.4, 6)
    plot.tile_schedule(4096, 4096, heads=8, causal=True, window=(1000, None), axes=figures["tiles"].subplots())

    figures["training"].set_size_inches(8, 4.5)
    curve = plot.learning_curve(
        range(1, len(losses) + 1), losses, title="reversing words",
        baseline=(2 - 1 / LETTERS - 1 / LENGTH) / (LETTERS + LENGTH), baseline_label="predicting the mean",
        axes=figures["training"].subplots(),
    )  # fmt: skip
    curve.legend()
    return figures


def main(arguments: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description="Draw attention weights, masks, tiles and a learning curve.")
    parser.add_argument("--output", type=Path, default=Path("runs/pictures"), help="the folder; default: %(default)s")
    parser.add_argument("--backend", help="default: POLYATTN_BACKEND, or numpy")
    parser.add_argument("--steps", type=int, default=400, help="training steps; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    options = parser.parse_args(arguments)

    selection = pa.use_backend(options.backend) if options.backend else nullcontext()
    with selection, threadpool_limits(1):  # threads do not speed up matrices of this size
        layer, losses = train(options.steps, options.seed)
        weights = layer.attention_weights(written(np.asarray([[ord(letter) - ord("A") for letter in WORD]])))[0]
        figures = draw(weights, losses)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(options.output / f"{name}.png", dpi=100)
        print(options.output / f"{name}.png")
    right = float(np.mean(np.trace(np.flip(weights, axis=2), axis1=1, axis2=2)) / LENGTH)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; {right:.0%} of the attention goes to the right letter")
    return right


if __name__ == "__main__":
    try:
        main()
    except pa.PolyattnError as error:
        sys.exit(f"pictures: {error}")
