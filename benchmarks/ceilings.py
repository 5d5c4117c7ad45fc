"""The speed of NumPy's matrix products alone: an upper bound for every attention that uses them.

    python benchmarks/ceilings.py

Forward and backward compute seven matrix products for each tile of scores: scores and output in the
forward, scores again, the gradient of the weights, and one for each of dq, dk and dv. Only these are
timed, without exp and sums, in threads with single-threaded BLAS, and on a few tiles that remain in a
core's cache. One query needs two products, and reads all keys and values. The ceiling is the peer's time
divided by that of the products; the ratio that polyattn reached in the same rounds is printed next to it.
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
    """Return a function that computes the products of forward and backward, with the tiles divided among threads."""
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
    """Return a function that computes the two products of the forward; the BLAS may use all its threads."""
    q, k, v = (case.inputs()[name] for name in ("q", "k", "v"))
    return lambda: (q @ np.swapaxes(k, -1, -2)) @ v


def line(case: Case, peer: str, rounds: int = 9) -> str:
    """Time the peer, polyattn and the products in interleaved rounds, and return a line of the table."""
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
    print(line(Case("attention", "forward", DECODE[0]), "torch-sdpa"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
