"""Compare polyattn on one CUDA device with its peers, in at most ten minutes; all results are compared with float64.

    python benchmarks/gpu.py --json gpu.json

polyattn's kernel on CuPy arrays is compared with the formula in CuPy; polyattn on torch tensors and on CuPy arrays
(converted to torch without a copy) is compared with torch's fused attention. All run in one process, in interleaved
rounds; each time is the median of the rounds, from the call until the device has finished.

The exit code is 1 if there is no device, or if a result of polyattn is wrong.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from _common import parser

import polyattn as pa
from polyattn import registry
from polyattn.bench import OURS, Case, Report, Row, Shape, compare

DEVICE, LIBRARY = "cuda:0", "cupy"  # the library computes the reference
BLOCK = 512  # rows of scores that the reference holds, in float64
TORCH_AIMS = ((128, "µs", 60.0), (16384, "ratio", 1 / 1.05))


class Comparison(NamedTuple):
    """The library of the input arrays, the backend, the peer, the lengths and the targets of a comparison."""

    name: str
    arrays: str
    backend: str
    peer: str
    lengths: tuple[int, ...]
    aims: tuple[tuple[int, str, float], ...]
    """Length, unit and bound: at most so many µs more than the peer, or at least such a ratio."""


COMPARISONS = (
    Comparison(
        "cupy", "cupy", "cupy", "plain-cupy", (1024, 2048, 4096, 8192, 16384),
        tuple((n, "ratio", 2.5) for n in (4096, 8192, 16384)),
    ),
    Comparison("torch", "torch", "torch", "torch-sdpa", (128, 1024, 4096, 16384), TORCH_AIMS),
    Comparison("cupy-by-torch", "cupy", "torch", "torch-sdpa", (128, 1024, 4096, 16384), TORCH_AIMS),
)  # fmt: skip


def missing() -> str | None:
    """Return why nothing can be measured on this machine, or None."""
    for name in ("cupy", "torch"):
        try:
            devices = registry.ready(name).devices()
        except pa.BackendUnavailableError as error:
            return str(error)
        if DEVICE not in devices:
            return f"{name} has no CUDA device: it has {', '.join(devices)}"
    return None


def reference(
    xp: Any, q: Any, k: Any, v: Any, dout: Any, *, causal: bool, backward: bool, block: int = BLOCK
) -> dict[str, Any]:
    """Return the output and the gradients in float64 by the formula, block by block of rows."""
    scale, n_q, n_k = 1 / math.sqrt(q.shape[-1]), q.shape[-2], k.shape[-2]
    results = {
        name: xp.zeros(x.shape, dtype=xp.float64) for name, x in (("out", dout), ("dq", q), ("dk", k), ("dv", v))
    }
    for start in range(0, n_q, block):
        rows = slice(start, min(start + block, n_q))
        q_, dout_ = q[..., rows, :], dout[..., rows, :]
        scores = q_ @ k.swapaxes(-1, -2) * scale
        if causal:
            seen = xp.arange(n_k) <= xp.arange(rows.start, rows.stop)[:, None] + n_k - n_q
            scores = xp.where(seen, scores, -math.inf)
        weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        results["out"][..., rows, :] = out = weights @ v
        if backward:
            dscores = weights * (dout_ @ v.swapaxes(-1, -2) - (dout_ * out).sum(axis=-1, keepdims=True))
            results["dq"][..., rows, :] = dscores @ k * scale
            results["dk"] += dscores.swapaxes(-1, -2) @ q_ * scale
            results["dv"] += weights.swapaxes(-1, -2) @ dout_
    return results if backward else {"out": results["out"]}


def expected(case: Case) -> dict[str, Any]:
    """Return the reference for a case on the host, from the inputs rounded to its dtype."""
    home = registry.ready(LIBRARY)
    xp, dtype = home.namespace(), home.dtype(case.dtype)
    given = {name: pa.to_backend(x, LIBRARY, DEVICE) for name, x in case.inputs().items()}
    inputs = {name: xp.astype(xp.astype(x, dtype), xp.float64) for name, x in given.items()}
    results = reference(xp, **inputs, causal=case.causal, backward=case.what == "both")
    return {name: home.to_numpy(x) for name, x in results.items()}


def cases(lengths: tuple[int, ...], longest: int) -> Iterator[Case]:
    """Yield the cases of a comparison, all with batch size 1, 8 heads and 64 features."""
    for n, dtype, what in itertools.product(lengths, ("float32", "float16"), ("forward", "both")):
        if n <= longest:
            for causal in (False, True) if n == 4096 else (False,):
                yield Case("attention", what, Shape(1, 8, n, n, 64), causal, dtype)


def verdict(comparison: Comparison, n: int, ours: Row, theirs: Row) -> str:
    """Return whether polyattn reaches its target; an empty string if there is none, or a time is missing."""
    if ours.milliseconds is None or theirs.milliseconds is None:
        return ""
    for length, kind, bound in comparison.aims:
        if length == n:
            more = (ours.milliseconds - theirs.milliseconds) * 1e3
            ratio = theirs.milliseconds / ours.milliseconds
            reached = more <= bound if kind == "µs" else ratio >= bound
            goal = f"{bound:g} µs more" if kind == "µs" else f"ratio {bound:.3g}"
            return f"{goal}: {'reached' if reached else 'missed'}"
    return ""


def line(comparison: Comparison, row: Row) -> str:
    """Return a row of the table."""
    numbers = ((row.milliseconds, "10.3f"), (row.ratio, "7.2f"), (row.error, "9.1e"), (row.memory_mib, "9.1f"))
    shown = " ".join(" " * int(form.partition(".")[0]) if x is None else format(x, form) for x, form in numbers)
    what = f"{row.what}{' causal' if row.causal else ''}"
    return f"{comparison.name:14} {row.peer:12} {row.shape:14} {row.dtype:8} {what:15} {shown}"


def main(arguments: list[str] | None = None) -> int:
    """Run the comparisons, print a table, and write the results."""
    options = parser(__doc__)
    options.add_argument("--json", type=Path, help="write the results to this file")
    options.add_argument("--rounds", type=int, default=7, help="number of rounds (default: 7)")
    options.add_argument("--longest", type=int, default=16384, help="leave out longer sequences")
    chosen = options.parse_args(arguments)
    if (reason := missing()) is not None:
        print(f"benchmarks/gpu.py: nothing to measure: {reason}", file=sys.stderr)
        return 1
    measure = partial(compare, device=DEVICE, rounds=chosen.rounds, memory=True, reference=expected)
    found: list[dict[str, Any]] = []
    for comparison in COMPARISONS:
        for case in cases(comparison.lengths, chosen.longest):
            report: Report = measure(
                [case], backend=comparison.backend, arrays=comparison.arrays, peers=[comparison.peer]
            )
            target = verdict(comparison, case.shape.n_q, *report.rows)
            for row in report.rows:
                aim = target if row.peer == OURS else ""
                print(f"{line(comparison, row)}  {aim} {row.note}".rstrip(), flush=True)
                found.append({"comparison": comparison.name, **asdict(row), "target": aim})
            if chosen.json:  # written after each comparison, so that an interrupted run keeps its results
                about = {"machine": report.machine, "versions": report.versions}
                chosen.json.write_text(json.dumps({**about, "rows": found}, indent=1), encoding="utf-8")
    wrong = [row for row in found if row["note"] and row["peer"] == OURS]
    print(f"{len(found)} rows; of polyattn's, {len(wrong)} are wrong or failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
