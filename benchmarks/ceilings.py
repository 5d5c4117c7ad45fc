"""What NumPy's matrix products alone allow: no attention that calls them can come closer to a peer than this.

    python benchmarks/ceilings.py

Forward and backward take seven products of each tile of scores: queries and keys, weights and values,
then both again and one for each gradient. Here only these run, on the same few tiles again and again,
which stay in a core's cache, each thread with the BLAS to itself: no exp, no sums, no memory to fetch.
One query takes two products, and reads all keys and values. The ceiling is the peer's time divided by
the products'; beside it stands what polyattn reached in the same turns.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from _common import DECODE, LONG
from threadpoolctl import threadpool_limits

from polyattn.bench import OURS, PEERS, Case, cores, race
from polyattn.bench._peers import ours

TILE = 256, 512  # queries and keys, as in the NumPy backend


def seven_products(case: Case, threads: int) -> Callable[[], None]:
    """Return what does the products of forward and backward, its tiles shared among threads."""
    (rows, columns), d = TILE, case.shape.d
    tiles = case.shape.scores // (rows * columns) // threads
    pool = ThreadPoolExecutor(threads)

    def share(seed: int) -> None:
        rng = np.random.default_rng(seed)
        q, k, scores = (rng.standard_normal(shape, dtype="float32") for shape in ((rows, d), (columns, d), TILE))
        k_t, weights, dq, dk = np.ascontiguousarray(k.T), scores.copy(), np.empty_like(q), np.empty_like(k)
        for _ in range(tiles):
            for _ in range(3):  # scores, scores again, dweights
                np.matmul(q, k_t, out=scores)
            for _ in range(2):  # out, dq
                np.matmul(weights, k, out=dq)
            for _ in range(2):  # dk, dv
                np.matmul(weights.T, q, out=dk)

    def run() -> None:
        with threadpool_limits(1):
            list(pool.map(share, range(threads)))

    return run


def two_products(case: Case, threads: int) -> Callable[[], None]:
    """Return what does the products of the forward as they are written; the BLAS may use all its threads."""
    q, k, v = (case.inputs()[name] for name in ("q", "k", "v"))
    return lambda: (q @ np.swapaxes(k, -1, -2)) @ v


def line(case: Case, peer: str, rounds: int = 9) -> str:
    """Let the peer, polyattn and the products take turns."""
    threads, both = cores(), case.what == "both"
    runs: dict[str, Callable[[], Any]] = {
        peer: PEERS[peer].contestant(case, "cpu", threads).run,
        OURS: ours("numpy").contestant(case, "cpu", threads).run,
        "products": (seven_products if both else two_products)(case, threads),
    }
    theirs, own, least = (statistics.median(seconds) * 1e3 for seconds in race(runs, rounds).values())
    operations = 2 * case.shape.scores * case.shape.d * (7 if both else 2)
    return (
        f"{f'{case.shape} {case.what}, {peer}':32} {theirs:9.2f} {own:9.2f} {least:9.2f} "
        f"{theirs / own:9.2f} {theirs / least:8.2f} {operations / least / 1e6:8.0f}"
    )


def main() -> int:
    """Print a line for each shape."""
    print(f"{'':32} {'peer':>9} {'polyattn':>9} {'products':>9}   reached  ceiling  GFLOP/s of the products")
    for shape in LONG:
        print(line(Case("attention", "both", shape), "plain-numpy"), flush=True)
    print(line(Case("attention", "forward", DECODE), "torch-sdpa"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
