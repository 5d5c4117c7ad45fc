"""The figures to reach, next to what this machine gives: medians over the standard shapes.

    python benchmarks/targets.py --list
    python benchmarks/targets.py numpy-torch-forward train    # one row, and all whose names begin so

A ratio is a peer's time divided by polyattn's, so more is better; each is the median of at least
seven rounds, in turns, in one process. The exit code is 1 where a figure is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from _common import DECODE, LAYERS, LONG, SHAPES, TINY, named, told, told_all

from polyattn.bench import OURS, Case, Report, Row, Shape, compare


@dataclass(frozen=True)
class Target:
    """A figure: polyattn on a backend against a peer. ``least`` is a ratio, or of ``overhead`` the most µs more."""

    name: str
    backend: str
    peer: str
    task: str
    what: str
    causal: bool
    shapes: tuple[Shape, ...]
    least: float
    aim: float | None = None

    @property
    def is_overhead(self) -> bool:
        return self.name == "numpy-overhead"


def both_ways(
    backend: str, peer: str, alias: str, shapes: tuple[Shape, ...], forward: Any, both: Any, masks: tuple[bool, ...]
) -> Iterator[Target]:
    """Yield attention's figures against a peer; a figure may be a pair (at least, aim for)."""
    for what, figure in (("forward", forward), ("both", both)):
        for causal in masks:
            of_mask = figure[causal] if isinstance(figure, dict) else figure
            least, aim = of_mask if isinstance(of_mask, tuple) else (of_mask, None)
            name = f"{backend}-{alias}-{what}{'-causal' if causal else ''}"
            yield Target(name, backend, peer, "attention", what, causal, shapes, least, aim)


TARGETS = (
    *both_ways("numpy", "torch-sdpa", "torch", SHAPES, (0.80, 1.0), (0.85, 1.1), (False, True)),
    *both_ways("numpy", "plain-numpy", "plain", LONG, 3.0, 4.0, (False,)),
    *both_ways("numpy", "jax", "jax", SHAPES, 2.0, 2.0, (False,)),
    *both_ways("torch", "torch-sdpa", "torch", SHAPES, {False: 0.97, True: 0.92}, 1.0, (False, True)),
    *both_ways("jax", "jax", "jax", LONG, 2.0, 1.5, (False,)),
    Target("train-torch", "torch", "torch-mha", "train", "step", False, LAYERS, 1.0, 1.1),
    Target("train-numpy", "numpy", "torch-mha", "train", "step", False, LAYERS, 0.6),
    Target("numpy-decode", "numpy", "torch-sdpa", "attention", "forward", False, (DECODE,), 0.8),
    Target("numpy-overhead", "numpy", "plain-numpy", "attention", "forward", False, (TINY,), 60.0),
)


@dataclass(frozen=True)
class Outcome:
    """A figure and what was measured: the median over the shapes, and the worst of them."""

    name: str
    least: float
    aim: float | None
    measured: float | None
    worst: float | None
    worst_shape: str
    reached: bool
    others: float | None = None
    notes: tuple[str, ...] = ()


def outcome(target: Target, report: Report) -> Outcome:
    """Judge a comparison of one peer; a peer that could not be timed leaves the figure unmeasured."""
    theirs = [row for row in report.rows if row.peer == target.peer]
    notes = tuple(f"{row.shape}: {row.note}" for row in theirs if row.note)
    figures = {row.shape: figure(target, row, report) for row in theirs if row.milliseconds is not None}
    if not figures:
        return Outcome(target.name, target.least, target.aim, None, None, "", False, notes=notes)
    worst = (max if target.is_overhead else min)(figures, key=lambda shape: figures[shape])
    median = statistics.median(figures.values())
    reached = median <= target.least if target.is_overhead else median >= target.least
    busy = report.machine["others"]
    return Outcome(target.name, target.least, target.aim, median, figures[worst], worst, reached, busy, notes)


def figure(target: Target, row: Row, report: Report) -> float:
    """Return the ratio of a row, or the µs that polyattn takes more."""
    if not target.is_overhead:
        return row.ratio or 0.0
    (ours,) = (r for r in report.rows if r.peer == OURS and r.shape == row.shape)
    return ((ours.milliseconds or 0.0) - (row.milliseconds or 0.0)) * 1e3


def measured(target: Target, rounds: int, threads: int | None) -> tuple[Outcome, Report]:
    """Run the comparison that a figure is about."""
    cases = [Case(target.task, target.what, shape, target.causal) for shape in target.shapes]
    report = compare(cases, backend=target.backend, peers=[target.peer], rounds=rounds, threads=threads, progress=told)
    told_all()
    return outcome(target, report), report


def line(found: Outcome) -> str:
    """Return a row of the table."""
    sign, unit = ("≤", " µs") if found.name == "numpy-overhead" else ("≥", "")
    goal = f"{sign} {found.least:g}{unit}" + (f", aim {found.aim:g}" if found.aim else "")
    if found.measured is None:
        return f"{found.name:28} {goal:16} not measured: {'; '.join(found.notes)}"
    verdict = "reached" if found.reached else "MISSED"
    worst = f"worst {found.worst:.2f} at {found.worst_shape}"
    disturbed = f"  ({found.others:.0%} of the cores used by others)" if (found.others or 0) >= 0.02 else ""
    return f"{found.name:28} {goal:16} {found.measured:6.2f}{unit:3} {verdict:8} {worst}{disturbed}"


def main(arguments: list[str] | None = None) -> int:
    """Measure the rows that were asked for, and print each as it is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", nargs="*", help="names of rows, or beginnings of some (default: all, about ten minutes)"
    )
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (default: 7)")
    parser.add_argument("--threads", type=int, help="of every library (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    names = named((target.name for target in TARGETS), options.rows)
    chosen = [target for target in TARGETS if target.name in names]
    if not chosen or options.rounds < 7:
        parser.error("expected the beginning of a row's name (see --list), and 7 rounds or more")
    if options.list:
        print(*(target.name for target in chosen), sep="\n")
        return 0
    found: list[Outcome] = []
    reports: list[Report] = []
    for target in chosen:
        one, report = measured(target, options.rounds, options.threads)
        found.append(one)
        reports.append(report)
        if not options.json:
            print(line(one), flush=True)
    if options.json:
        versions = {name: version for report in reports for name, version in report.versions.items()}
        rows = [asdict(one) for one in found]
        print(json.dumps({"machine": reports[0].machine, "versions": versions, "rows": rows}))
    return 0 if all(one.reached for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
