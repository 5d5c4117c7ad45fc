"""A plot of time and memory against the length of the sequence, a line for each contestant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..plot._file import expect_writable, write_png
from ._case import Shape, parse_shape
from ._compare import Report, Row
from ._ours import OURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "writable"]

WHATS = {"forward": "forward", "both": "forward + backward", "step": "training step"}
# The colour-blind safe palette of Okabe and Ito; polyattn's line is dark and thick.
COLOURS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
MARKERS = "osD^vPX*"


def writable(path: Path, shapes: Sequence[Shape]) -> None:
    """Check before a measurement that these shapes can be drawn and that the file can be written."""
    expect_writable(path)
    if len({(shape.batch, shape.heads, shape.n_q == shape.n_k, shape.d) for shape in shapes}) > 1:
        raise ArgumentError(f"plot: expected shapes that differ in n alone, got {' '.join(map(str, shapes))}")


def draw(report: Report, path: Path) -> None:
    """Draw a report, and write it as PNG."""
    write_png(picture(report), path)


def picture(report: Report) -> Figure:
    """Return a figure with a row for each part of the task: time on the left, memory on the right."""
    from matplotlib.figure import Figure

    whats = list(dict.fromkeys(row.what for row in report.rows))
    peers = list(dict.fromkeys(row.peer for row in report.rows if row.milliseconds is not None))
    figure = Figure(figsize=(11, 0.9 + 4.2 * len(whats)), layout="constrained")
    panels = figure.subplots(len(whats), 2, squeeze=False)
    for what, (time, memory) in zip(whats, panels, strict=True):
        rows = [row for row in report.rows if row.what == what]
        _lines(time, rows, peers, "milliseconds")
        _lines(memory, rows, peers, "memory_mib")
        time.set_title(f"{WHATS[what]}: time")
        memory.set_title(f"{WHATS[what]}: peak memory of the call, results included")
        time.set_ylabel("median time (ms)")
        memory.set_ylabel("peak memory (MiB)")
    figure.suptitle(_title(report))
    handles = [line for line in panels[0][0].get_lines() if not str(line.get_label()).startswith("_")]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(peers), 7), frameon=False)
    return figure


def _lines(axes: Axes, rows: Sequence[Row], peers: Sequence[str], field: str) -> None:
    lengths: set[int] = set()
    for index, peer in enumerate(peers):
        points = [(parse_shape(r.shape).n_k, getattr(r, field)) for r in rows if r.peer == peer]
        points = sorted((n, value) for n, value in points if value)
        lengths |= {n for n, _ in points}
        axes.plot(
            [n for n, _ in points], [value for _, value in points], label=peer, color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)], markersize=5, linewidth=2.6 if peer == OURS else 1.4,
            zorder=3 if peer == OURS else 2,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(lengths), [str(n) for n in sorted(lengths)])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_xlabel("sequence length n")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if not lengths:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#666666")


def _title(report: Report) -> str:
    shape = parse_shape(report.rows[0].shape)
    causal = ", causal" if report.rows[0].causal else ""
    what: dict[str, Any] = {"attention": "attention", "layer": "multi-head attention", "train": "training"}
    return (
        f"{what[report.task]}, batch {shape.batch}, {shape.heads} heads, d {shape.d}, {report.rows[0].dtype}{causal}\n"
        f"polyattn on {report.backend} ({report.device}), {report.machine['processor']}"
    )
