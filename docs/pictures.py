"""The pictures of these pages, drawn when the pages are built, and the chart of the README.

``python docs/pictures.py`` draws that chart from the tables in benchmarks.md and writes images/benchmark.png, which is
committed because the README shows it. Run it whenever the figures have been measured again.
"""

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
    plot.attention_map(layer.attention_weights(4 * x, causal=True), title="a layer before training", figure=figure)
    figure.savefig(folder / "heads.png", dpi=70)


CHART = Path(__file__).parent / "images" / "benchmark.png"
TABLES = {
    "time in ms": "### Attention, numpy arrays, forward + backward\n",
    "peak memory in MiB": "### Peak memory of a call, results included, `1,8,4096,64`\n",
}
PEERS = {
    "polyattn": "polyattn",
    "torch-sdpa": "torch, fused attention",
    "jax": "JAX",
    "plain-numpy": "the formula in NumPy",
}


def figures(page: str) -> dict[str, dict[str, float]]:
    """Return the figures of the chart by axis and contestant, read from the page of benchmarks."""
    times, memory = (rows(page, heading) for heading in TABLES.values())
    (shape,) = (row for row in times[1:] if row[0] == "`1,8,4096,64`")
    time = dict(zip(times[0][1:], (float(cell.split()[0]) for cell in shape[1:]), strict=True))
    peak = {who.removesuffix(" on numpy"): float(mib) for who, what, mib in memory[1:] if what == "forward + backward"}
    return dict(zip(TABLES, (time, peak), strict=True))


def rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without the line between head and body."""
    table = page.split(heading)[1].strip().split("\n\n")[0]
    head, _, *body = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")
    )
    return [head, *body]


def chart(path: Path = CHART) -> None:
    """Draw the time and the peak memory of a call, forward and backward, for each contestant."""
    page = (Path(__file__).parent / "benchmarks.md").read_text(encoding="utf-8")
    figure = Figure(figsize=(9, 2.6), layout="constrained", facecolor="white")
    for axes, (label, found) in zip(figure.subplots(1, 2, sharey=True), figures(page).items(), strict=True):
        values = [found[peer] for peer in PEERS]
        bars = axes.barh(list(PEERS.values()), values, color=["#0969da", *["#8c959f"] * (len(PEERS) - 1)])
        axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], padding=4)
        axes.set(title=label, xlim=(0, 1.18 * max(values)), xticks=[])
        axes.spines[:].set_visible(False)
        axes.tick_params(left=False)
    axes.invert_yaxis()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    chart()
