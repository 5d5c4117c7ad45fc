"""Measure the performance targets on this machine: medians over the standard shapes; with "each", the worst of them.

    python benchmarks/targets.py --list
    python benchmarks/targets.py numpy-torch-forward train    # rows by name or prefix

A ratio is a peer's time divided by polyattn's, so a larger one is better; each is the median of at
least seven interleaved rounds in one process. Memory is that of one call at n = 16384, 8 heads of 64
features, without its inputs and results; from n / 2 to n it must grow at most by 2.2 times (Linux
only). The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from _common import DECODE, LAYERS, LONG, SHAPES, TINY, parsed, parser, progress

from polyattn.bench import OURS, Case, Report, Shape, compare, cores, peak_memory

GROWTH = 2.2  # the largest allowed growth of the memory, results included, from n / 2 to n


class Target(NamedTuple):
    """A target: ``least`` is the least ratio to a peer; with a ``unit``, µs or MiB, it is the largest allowed value."""

    name: str
    backend: str
    peer: str
    task: str
    what: str
    causal: bool
    shapes: tuple[Shape, ...]
    least: float
    unit: str = ""
    dtype: str = "float32"
    every: bool = False
    """Whether the target holds for each shape, not only for the median."""


def attention(
    backend: str, peer: str, alias: str, shapes: tuple[Shape, ...], *figures: tuple[str, bool, float], **more: Any
) -> list[Target]:
    """Return attention's targets against a peer, from what, causal and the least ratio."""
    return [
        Target(
            f"{backend}-{alias}-{what}{'-causal' if causal else ''}", backend, peer, "attention", what, causal, shapes,
            least, **more,
        )
        for what, causal, least in figures
    ]  # fmt: skip


SDPA, N16384 = "torch-sdpa", (Shape(1, 8, 16384, 16384, 64),)
MEMORY = {
    f"memory-{backend}-{what}": Target(
        f"memory-{backend}-{what}", backend, "", "attention", what, False, N16384, most, unit="MiB"
    )
    for backend in ("numpy", "torch", "jax")
    for what, most in (("forward", 64.0), ("both", 160.0))
}
FORWARD = (("forward", False, 1.2), ("forward", True, 1.4))
BOTH = (("both", False, 1.25), ("both", True, 1.4))
EACH = (("forward", False, 1.0), ("forward", True, 1.0))
TARGETS = {
    target.name: target
    for target in (
        *attention("numpy", SDPA, "torch", SHAPES, *FORWARD, *BOTH),
        *attention("torch", SDPA, "torch", SHAPES, *FORWARD, *BOTH),
        *(
            target
            for backend in ("numpy", "torch")
            for peer in ("onnx-attention", "onnx-mha")
            for target in attention(backend, peer, peer, SHAPES, *EACH, every=True)
        ),
        *attention("torch", SDPA, "bfloat16", SHAPES, ("forward", False, 1.8), ("both", False, 1.3), dtype="bfloat16"),
        *attention("torch", SDPA, "float16", SHAPES, ("forward", False, 1.5), ("both", False, 3.0), dtype="float16"),
        *attention("numpy", "plain-numpy", "plain", LONG, ("forward", False, 3.0), ("both", False, 4.0)),
        *attention("numpy", "jax", "jax", SHAPES, ("forward", False, 2.0), ("both", False, 2.0)),
        *attention("jax", "jax", "jax", LONG, ("forward", False, 2.0), ("both", False, 1.5)),
        Target("train-torch", "torch", "torch-mha", "train", "step", False, LAYERS, 1.15),
        Target("train-numpy", "numpy", "torch-mha", "train", "step", False, LAYERS, 1.05),
        *(
            Target(f"{backend}-decode", backend, SDPA, "attention", "forward", False, DECODE, 1.2)
            for backend in ("numpy", "torch")
        ),
        Target("numpy-overhead", "numpy", "plain-numpy", "attention", "forward", False, (TINY,), 15.0, unit="µs"),
        Target("torch-overhead", "torch", SDPA, "attention", "forward", False, (TINY,), 20.0, unit="µs"),
        *MEMORY.values(),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A target and its measurement: the median over the shapes, and the worst of them."""

    name: str
    least: float
    measured: float | None = None
    worst: float | None = None
    worst_shape: str = ""
    reached: bool = False
    others: float | None = None
    notes: tuple[str, ...] = ()


def outcome(target: Target, report: Report) -> Outcome:
    """Return the outcome of a comparison with one peer; without a measurement if the peer could not be timed."""
    theirs = [row for row in report.rows if row.peer == target.peer]
    ours = {row.shape: row.milliseconds or 0.0 for row in report.rows if row.peer == OURS}
    notes = tuple(f"{row.shape}: {row.note}" for row in theirs if row.note)
    figures = {
        row.shape: (ours[row.shape] - row.milliseconds) * 1e3 if target.unit else row.ratio or 0.0
        for row in theirs
        if row.milliseconds is not None
    }
    if not figures:
        return Outcome(target.name, target.least, notes=notes)
    worst = (max if target.unit else min)(figures, key=lambda shape: figures[shape])
    median = statistics.median(figures.values())
    judged = figures[worst] if target.every else median
    reached = judged <= target.least if target.unit else judged >= target.least
    busy = report.machine["others"]
    return Outcome(target.name, target.least, median, figures[worst], worst, reached, busy, notes)


def memory(target: Target, threads: int | None = None, peak: Callable[..., Any] = peak_memory) -> dict[str, Any]:
    """Measure the MiB of a call without its results, and the growth of the total from n / 2 to n."""
    (shape,) = target.shapes
    half, whole = (
        peak(OURS, Case(target.task, target.what, shape._replace(n_q=n, n_k=n)), target.backend, "cpu",
             threads or cores())
        for n in (shape.n_k // 2, shape.n_k)
    )  # fmt: skip
    # The forward keeps the log-sum-exp for the backward, which is not among the results.
    lse = 4 * shape.batch * shape.heads * shape.n_q if target.what == "both" else 0
    return {
        "backend": target.backend, "what": target.what, "n": shape.n_k, "peak_mib": whole.peak / 2**20,
        "beyond_mib": (whole.beyond - lse) / 2**20, "growth": whole.peak / max(half.peak, 1),
    }  # fmt: skip


def measured(target: Target, rounds: int, threads: int | None) -> tuple[Outcome, Report | None]:
    """Run the measurement of a target."""
    if target.name in MEMORY:
        found = memory(target, threads)
        beyond, growth = found["beyond_mib"], found["growth"]
        note = f"growth from n/2 {growth:.2f} (at most {GROWTH:g})"
        reached = beyond <= target.least and growth <= GROWTH
        return Outcome(target.name, target.least, beyond, beyond, str(*target.shapes), reached, None, (note,)), None
    cases = [Case(target.task, target.what, shape, target.causal, target.dtype) for shape in target.shapes]
    report = compare(
        cases, backend=target.backend, peers=[target.peer], rounds=rounds, threads=threads, progress=progress
    )
    return outcome(target, report), report


def line(found: Outcome) -> str:
    """Return a row of the table."""
    unit, every = TARGETS[found.name].unit, TARGETS[found.name].every
    goal = f"{'≤' if unit else '≥'} {found.least:g} {unit}".rstrip() + " each" * every
    notes = "; ".join(found.notes)
    if found.measured is None:
        return f"{found.name:28} {goal:16} not measured: {notes}"
    verdict = "reached" if found.reached else "MISSED"
    worst = f"worst {found.worst:.2f} at {found.worst_shape}"
    disturbed = f"({found.others:.0%} of the cores used by others)" if (found.others or 0) >= 0.02 else ""
    return f"{found.name:28} {goal:16} {found.measured:6.2f} {unit:3} {verdict:8} {worst}  {notes} {disturbed}".rstrip()


def main(arguments: list[str] | None = None) -> int:
    """Measure the chosen rows, by default all in about a quarter of an hour, and print each when it is done."""
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7, help="number of rounds, at least 7 (default: 7)")
    options.add_argument("--threads", type=int, help="threads of each library (default: all cores)")
    options.add_argument("--json", action="store_true", help="print one JSON object instead")
    chosen = parsed(options, TARGETS, arguments)
    if chosen.rounds < 7:
        options.error("expected 7 rounds or more")
    found, reports = [], []
    for name in chosen.wanted:
        one, report = measured(TARGETS[name], chosen.rounds, chosen.threads)
        found.append(one)
        reports += [report] if report else []
        if not chosen.json:
            print(line(one), flush=True)
    if chosen.json:
        versions = {name: version for report in reports for name, version in report.versions.items()}
        machine = reports[0].machine if reports else {}
        print(json.dumps({"machine": machine, "versions": versions, "rows": [asdict(one) for one in found]}))
    return 0 if all(one.reached for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
