"""Measure the figures of docs/benchmarks.md: one JSON file for each part, in a folder.

    python benchmarks/figures.py --list
    python benchmarks/figures.py --output figures                     # all parts, about half an hour
    python benchmarks/figures.py --output figures attention-numpy     # one, or those that begin so

Every part is a comparison of its own, so that a machine with little time to spare can do one after
the other. ``benchmarks/page.py figures`` then writes the page. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import memory
from _common import DECODE, LAYERS, SHAPES, TINY, named, told, told_all

from polyattn.bench import PEERS, TASKS, Case, Shape, compare, cores, parse_shape, peak_memory

# NumPy's arrays against everyone, other libraries' against what they bring themselves.
PEERS_OF = {"numpy": None, "torch": ["torch-sdpa"], "jax": ["jax", "polyattn-jit"]}
WEIGHED = parse_shape("1,8,4096,64")


def compared(task: str, backend: str, whats: tuple[str, ...], causal: bool, shapes: tuple[Shape, ...]) -> Any:
    """Run one comparison."""
    peers = PEERS_OF[backend] if task == "attention" else ["torch-mha"]
    cases = [Case(task, what, shape, causal) for shape in shapes for what in whats]
    report = compare(cases, backend=backend, peers=peers, progress=told)
    told_all()
    return report.to_dict()


def memory_of_ours() -> Any:
    """Measure polyattn at n = 16384."""
    lines = [memory.measured(backend, what, 16384, cores()) for backend in PEERS_OF for what in memory.MOST]
    return {"rows": [asdict(line) for line in lines]}


def memory_of_all() -> Any:
    """Measure everyone who is here at n = 4096."""
    rows = []
    contestants = [("polyattn", backend) for backend in PEERS_OF]
    contestants += [(name, "numpy") for name, peer in PEERS.items() if name != "torch-mha" and not peer.missing()]
    for name, backend in contestants:
        for what in TASKS["attention"]:
            if name == "polyattn" or (what in PEERS[name].kinds and "cpu" in PEERS[name].devices):
                found = peak_memory(name, Case("attention", what, WEIGHED), backend, "cpu", cores())
                rows.append({"peer": name, "backend": backend, "what": what, "peak_mib": found.peak / 2**20})
    return {"shape": str(WEIGHED), "rows": rows}


def parts() -> dict[str, Callable[[], Any]]:
    """Return what can be measured, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for backend in PEERS_OF:
        for what in TASKS["attention"]:
            for causal in (False, True):
                name = f"attention-{backend}-{what}{'-causal' if causal else ''}"
                found[name] = partial(compared, "attention", backend, (what,), causal, SHAPES)
        found[f"small-{backend}"] = partial(compared, "attention", backend, TASKS["attention"], False, (DECODE, TINY))
        for task in ("layer", "train"):
            found[f"{task}-{backend}"] = partial(compared, task, backend, TASKS[task], False, LAYERS)
    return found | {"memory-ours": memory_of_ours, "memory-all": memory_of_all}


def main(arguments: list[str] | None = None) -> int:
    """Measure the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="names of parts, or beginnings of some (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="the folder (default: figures)")
    options = parser.parse_args(arguments)
    chosen = {name: parts()[name] for name in named(parts(), options.parts)}
    if not chosen:
        parser.error("expected the beginning of a part's name (see --list)")
    if options.list:
        print(*chosen, sep="\n")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    for name, measure in chosen.items():
        path = options.output / f"{name}.json"
        path.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
        print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
