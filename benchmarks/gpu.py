"""polyattn on one CUDA device against its peers: within ten minutes, every result checked against float64.

    python benchmarks/gpu.py --json gpu.json

Two comparisons. CuPy arrays in polyattn's own kernel, against the formula in CuPy. And torch's
fused attention as polyattn calls it, on torch's tensors and on CuPy's arrays (whose memory torch
is lent), against calling it directly. Contestants take turns in one process; each time is the
median of the rounds, from the call until the device has finished.

The exit code is 1 where there is no device, or where a result of polyattn's is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import polyattn as pa
from polyattn import registry
from polyattn.bench import PEERS, Case, Shape, race

TOLERANCE = {"float32": 2e-5, "float16": 1e-2}  # in units of the largest element of an array
DEVICE, LIBRARY = "cuda:0", "cupy"  # the library computes the reference
BLOCK = 512  # rows of scores that the reference holds, in float64
OF_CUPY = {"name": "cupy", "ours": {"cupy": ("cupy", "cupy")}, "peer": "plain-cupy"}
OF_TORCH = {
    "name": "torch",
    "ours": {"torch": ("torch", "torch"), "cupy-by-torch": ("cupy", "torch")},
    "peer": "torch-sdpa",
}
COMPARISONS = ((OF_CUPY, (1024, 2048, 4096, 8192, 16384)), (OF_TORCH, (128, 1024, 4096, 16384)))


@dataclass
class Row:
    """One contestant on one problem; ``ratio`` is its peer's time divided by its own."""

    comparison: str
    contestant: str
    shape: str
    what: str
    causal: bool
    dtype: str
    milliseconds: float | None = None
    ratio: float | None = None
    error: float | None = None
    memory_mib: float | None = None
    target: str = ""
    note: str = ""


def missing() -> str | None:
    """Return why there is nothing to measure here, or None."""
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
    """Return the output and the gradients in float64 by the formula, a block of rows after the other."""
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


def difference(got: dict[str, Any], want: dict[str, Any]) -> float:
    """Return the largest error of all arrays, each in units of its largest element; NaN where one is not finite."""
    errors = [np.max(np.abs(got[name] - x)) / np.max(np.abs(x)) for name, x in want.items()]
    return math.nan if np.isnan(errors).any() else float(max(errors))


def expected(case: Case) -> dict[str, Any]:
    """Return the reference for a case on the host, of inputs as its dtype holds them."""
    home = registry.ready(LIBRARY)
    xp = home.namespace()
    inputs = {name: xp.astype(x, xp.float64) for name, x in placed(case, LIBRARY).items()}
    results = reference(xp, **inputs, causal=case.causal, backward=case.what == "both")
    return {name: home.to_numpy(x) for name, x in results.items()}


def placed(case: Case, library: str) -> dict[str, Any]:
    """Return the inputs as arrays of a library, in the dtype of the case."""
    home = registry.ready(library)
    dtype, astype = home.dtype(case.dtype), home.namespace().astype
    return {name: astype(pa.to_backend(x, library, DEVICE), dtype) for name, x in case.inputs().items()}


def contestants(
    comparison: dict[str, Any], case: Case
) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Yield a name, what is timed, and what brings its results to the host."""
    peer = PEERS[comparison["peer"]]
    yield (peer.name, *peer.contestant(case, DEVICE, 1))
    for name, (library, backend) in comparison["ours"].items():
        yield name, *ours(case, library, backend)


def ours(case: Case, library: str, backend: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Return polyattn on arrays of a library, computed by a backend."""
    home = registry.ready(library)
    q, k, v, dout = placed(case, library).values()

    def run() -> dict[str, Any]:
        if case.what == "forward":
            results = {"out": pa.attention(q, k, v, causal=case.causal, backend=backend)}
        else:
            out, cache = pa.attention_forward(q, k, v, causal=case.causal, backend=backend)
            grads = pa.attention_backward(dout, cache)
            results = {"out": out, "dq": grads.q, "dk": grads.k, "dv": grads.v}
        home.synchronize(*results.values())
        return results

    return run, lambda results: {name: np.asarray(home.to_numpy(x), dtype="float64") for name, x in results.items()}


def memory_of(run: Callable[[], Any]) -> float:
    """Return the MiB by which a run raised what CuPy's pool and torch's allocator hold, its results included."""
    import cupy
    import torch

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = pool.total_bytes(), torch.cuda.memory_allocated()
    run()
    return round((pool.total_bytes() - before[0] + torch.cuda.max_memory_allocated() - before[1]) / 2**20, 1)


def compare(comparison: dict[str, Any], case: Case, rounds: int) -> list[Row]:
    """Check each contestant, measure its memory, then time those that can."""
    want, rows, runs = expected(case), [], {}
    for name, run, fetch in contestants(comparison, case):
        row = Row(comparison["name"], name, str(case.shape), case.what, case.causal, case.dtype)
        rows.append(row)
        try:
            row.error = difference(fetch(run()), want)
            row.memory_mib = memory_of(run)
        except Exception as failure:  # out of memory, as the formula may be
            row.note = f"failed: {type(failure).__name__}: {str(failure).strip().splitlines()[0]}"
            continue
        if not row.error <= TOLERANCE[case.dtype]:
            row.note = "wrong"
        runs[name] = run
    seconds = race(runs, rounds) if runs else {}
    medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
    for row in rows:
        row.milliseconds = medians.get(row.contestant)
        if row.contestant in comparison["ours"] and row.milliseconds and comparison["peer"] in medians:
            row.ratio = medians[comparison["peer"]] / row.milliseconds
            row.target = verdict(row, case.shape.n_q, medians[comparison["peer"]])
    return rows


def verdict(row: Row, n: int, peer: float) -> str:
    """Say whether a row reaches what is aimed at; nothing where nothing is."""
    if row.milliseconds is None or row.ratio is None:
        return ""
    if row.comparison == "cupy":
        return "" if n < 4096 else f"2.5 x: {'reached' if row.ratio >= 2.5 else 'missed'}"
    if n == 16384:
        return f"within 5 %: {'reached' if row.ratio >= 1 / 1.05 else 'missed'}"
    if n == 128:
        return f"60 us: {'reached' if row.milliseconds - peer <= 0.06 else 'missed'}"
    return ""


def cases(lengths: tuple[int, ...], longest: int) -> Iterator[Case]:
    """Yield the problems of a comparison, one batch entry of eight heads of 64 features each."""
    for n, dtype, what in itertools.product(lengths, TOLERANCE, ("forward", "both")):
        if n <= longest:
            for causal in (False, True) if n == 4096 else (False,):
                yield Case("attention", what, Shape(1, 8, n, n, 64), causal, dtype)


def machine() -> tuple[dict[str, Any], dict[str, str]]:
    """Return the device in words and numbers, and the releases of what took part."""
    import cupy
    import torch

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    found = {"device": properties["name"].decode(), "memory_gib": round(properties["totalGlobalMem"] / 2**30, 1)}
    found |= {"driver": runtime.driverGetVersion(), "runtime": runtime.runtimeGetVersion()}
    versions = {"polyattn": pa.__version__, "numpy": np.__version__, "cupy": cupy.__version__}
    return found, versions | {"torch": torch.__version__, "cuda of torch": str(torch.version.cuda)}


def line(row: Row) -> str:
    """Return a row of the table."""
    numbers = ((row.milliseconds, "10.3f"), (row.ratio, "7.2f"), (row.error, "9.1e"), (row.memory_mib, "9.1f"))
    shown = " ".join(" " * int(form.partition(".")[0]) if x is None else format(x, form) for x, form in numbers)
    what = f"{row.what}{' causal' if row.causal else ''}"
    return f"{row.contestant:14} {row.shape:14} {row.dtype:8} {what:15} {shown}  {row.target} {row.note}".rstrip()


def main() -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant (default: 7)")
    parser.add_argument("--longest", type=int, default=16384, help="leave out longer sequences")
    options = parser.parse_args()
    if (reason := missing()) is not None:
        print(f"benchmarks/gpu.py: nothing to measure: {reason}", file=sys.stderr)
        return 1
    found, versions = machine()
    print(found, versions)
    header = ("contestant", "shape", "dtype", "what", "ms", "ratio", "error", "MiB")
    print("{:14} {:14} {:8} {:15} {:>10} {:>7} {:>9} {:>9}".format(*header))
    rows: list[Row] = []
    for comparison, lengths in COMPARISONS:
        for case in cases(lengths, options.longest):
            new = compare(comparison, case, options.rounds)
            print(*map(line, new), sep="\n", flush=True)
            rows += new
            if options.json:  # again after each, so that a run that is cut short leaves what it found
                report = {"machine": found, "versions": versions, "rows": [asdict(row) for row in rows]}
                options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    wrong = [row for row in rows if row.note and row.contestant not in PEERS]
    print(f"{len(rows)} rows; of polyattn's, {len(wrong)} are wrong or failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
