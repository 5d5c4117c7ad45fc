"""The pictures of these pages, drawn by polyattn itself when the pages are built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

import polyattn as pa
from polyattn import plot

MASKS = {
    "causal": {"causal": True},
    "decoding": {"causal": True, "n_q": 3},
    "upper-left": {"causal": True, "n_q": 8, "q_offset": 0},
    "window": {"window": (3, 1)},
    "causal window": {"causal": True, "window": (4, None)},
    "key lengths": {"key_lengths": 9},
    "segments": {"segment_ids": (np.repeat([0, 1, 2], [5, 4, 3]),) * 2},
    "segments, causal": {"segment_ids": (np.repeat([0, 1, 2], [5, 4, 3]),) * 2, "causal": True},
    "bias of −inf": {"bias": np.where(np.arange(12) % 3 == 2, -np.inf, 0.0)},
}


def draw(folder: Path) -> None:
    """Write all pictures as PNG files."""
    folder.mkdir(exist_ok=True)
    figure = Figure(figsize=(10, 10.5), layout="constrained")
    for axes, (name, arguments) in zip(figure.subplots(3, 3).flat, MASKS.items(), strict=True):
        arguments = dict(arguments)
        plot.mask(arguments.pop("n_q", 12), 12, axes=axes, title=name, **arguments)
    figure.savefig(folder / "masks.png", dpi=90)

    figure = Figure(figsize=(12, 6.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot.tile_schedule(4096, 4096, heads=8, causal=True, axes=left)
    plot.tile_schedule(4096, 4096, heads=8, causal=True, window=(1000, None), axes=right)
    figure.savefig(folder / "tiles.png", dpi=90)

    x = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    layer = pa.MultiHeadAttention(32, 4, seed=2)
    figure = Figure(layout="constrained")
    plot.attention_map(
        layer.attention_weights(4 * x, causal=True), title="a layer that has learnt nothing", figure=figure
    )
    figure.savefig(folder / "heads.png", dpi=70)
