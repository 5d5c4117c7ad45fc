"""Memory of one call at n = 16384 beside inputs and results, and its growth from n to 2n.

    python benchmarks/memory.py --backend numpy --backend torch --backend jax

8 heads of 64 features in float32. Each figure is the rise of the resident set during one call, in
a process of its own (see polyattn/bench/_memory.py), less the results: out of the forward; out,
lse and the three gradients of forward and backward together. Linux only.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

from polyattn.bench import Case, Shape, cores, peak_memory

HEADS, D = 8, 64
MOST = {"forward": 64.0, "both": 160.0}  # MiB
GROWTH = 2.2  # from n to 2n, of the whole: results and what is needed beside them


@dataclass(frozen=True)
class Line:
    """What was measured of one backend: MiB beyond the results, and by what the rise grew since n / 2."""

    backend: str
    what: str
    n: int
    peak_mib: float
    beyond_mib: float
    growth: float
    reached: bool


def lse_bytes(n: int, what: str) -> int:
    """Return the size of the log-sum-exp, which the forward hands to the backward and the result does not show."""
    return 4 * HEADS * n if what == "both" else 0


def measured(backend: str, what: str, n: int, threads: int) -> Line:
    """Measure at n / 2 and n."""
    half, whole = (
        peak_memory("polyattn", Case("attention", what, Shape(1, HEADS, m, m, D)), backend, "cpu", threads)
        for m in (n // 2, n)
    )
    beyond = (whole.beyond - lse_bytes(n, what)) / 2**20
    growth = whole.peak / max(half.peak, 1)
    reached = beyond <= MOST[what] and growth <= GROWTH
    return Line(backend, what, n, whole.peak / 2**20, beyond, growth, reached)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each backend and direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", help="repeatable (default: numpy, torch, jax)")
    parser.add_argument("--what", choices=tuple(MOST), action="append", help="repeatable (default: both of them)")
    parser.add_argument("--n", type=int, default=16384, help="the length (default: 16384)")
    parser.add_argument("--threads", type=int, default=cores(), help="of every library (default: all cores)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args(arguments)
    lines = []
    for backend in options.backend or ("numpy", "torch", "jax"):
        for what in options.what or MOST:
            line = measured(backend, what, options.n, options.threads)
            lines.append(line)
            if not options.json:
                print(
                    f"{backend:8} {what:8} n={line.n}  {line.beyond_mib:7.1f} MiB beyond the results "
                    f"(at most {MOST[what]:g}), growth from n/2 {line.growth:.2f} (at most {GROWTH:g}): "
                    f"{'reached' if line.reached else 'MISSED'}",
                    flush=True,
                )
    if options.json:
        print(json.dumps({"rows": [asdict(line) for line in lines]}))
    return 0 if all(line.reached for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
