"""Run the measurements of docs/benchmarks.md, and write one JSON file for each part to a folder.

    python benchmarks/figures.py --list
    python benchmarks/figures.py --output figures                     # all parts, about half an hour
    python benchmarks/figures.py --output figures attention-numpy     # those with this prefix

The parts are independent comparisons and can be run at different times. ``benchmarks/page.py figures``
then writes the page. Run nothing else at the same time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _common import DECODE, LAYERS, SHAPES, TINY, parsed, parser, progress
from targets import MEMORY, memory

from polyattn.bench import OURS, PEERS, TASKS, Case, Shape, compare, cores, parse_shape, peak_memory

# On NumPy's arrays polyattn is compared with all peers, on those of other libraries with the library's own functions.
PEERS_OF = {"numpy": None, "torch": ["torch-sdpa"], "jax": ["jax", "polyattn-jit"]}
WEIGHED = parse_shape("1,8,4096,64")


def compared(task: str, backend: str, whats: tuple[str, ...], causal: bool, shapes: tuple[Shape, ...]) -> Any:
    """Run one comparison."""
    peers = PEERS_OF[backend] if task == "attention" else ["torch-mha"]
    cases = [Case(task, what, shape, causal) for shape in shapes for what in whats]
    return compare(cases, backend=backend, peers=peers, progress=progress).to_dict()


def memory_of_ours() -> Any:
    """Measure the memory of polyattn at n = 16384."""
    return {"rows": [memory(target) for target in MEMORY.values()]}


def memory_of_all() -> Any:
    """Measure the memory of polyattn and all installed peers at n = 4096."""
    contestants = [(OURS, backend, TASKS["attention"]) for backend in PEERS_OF]
    contestants += [
        (name, "numpy", tuple(what for what in TASKS["attention"] if what in peer.kinds))
        for name, peer in PEERS.items()
        if "attention" in peer.tasks and "cpu" in (peer.devices or ()) and not peer.missing()
    ]
    rows = []
    for name, backend, whats in contestants:
        for what in whats:
            found = peak_memory(name, Case("attention", what, WEIGHED), backend, "cpu", cores())
            rows.append({"peer": name, "backend": backend, "what": what, "peak_mib": found.peak / 2**20})
    return {"shape": str(WEIGHED), "rows": rows}


def parts() -> dict[str, Callable[[], Any]]:
    """Return the function of each part, by name."""
    found: dict[str, Callable[[], Any]] = {}
    for backend in PEERS_OF:
        for what in TASKS["attention"]:
            for causal in (False, True):
                name = f"attention-{backend}-{what}{'-causal' if causal else ''}"
                found[name] = partial(compared, "attention", backend, (what,), causal, SHAPES)
        found[f"small-{backend}"] = partial(compared, "attention", backend, TASKS["attention"], False, (*DECODE, TINY))
        for task in ("layer", "train"):
            found[f"{task}-{backend}"] = partial(compared, task, backend, TASKS[task], False, LAYERS)
    return found | {"memory-ours": memory_of_ours, "memory-all": memory_of_all}


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts."""
    options = parser(__doc__)
    options.add_argument("--output", type=Path, default=Path("figures"), help="the folder (default: figures)")
    chosen = parsed(options, parts(), arguments)
    chosen.output.mkdir(parents=True, exist_ok=True)
    for name in chosen.wanted:
        path = chosen.output / f"{name}.json"
        path.write_text(json.dumps(parts()[name](), indent=1) + "\n", encoding="utf-8")
        print(path, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
