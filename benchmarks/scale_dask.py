"""Attention on Dask against one process: (1, 8, 16384, 64) in float32, causal, in chunks of 2048 positions.

    python benchmarks/scale_dask.py --output dask.json    # three minutes; scale.py page writes it into docs/scale.md

One process has two threads; so have Dask's threads together, and its two worker processes have one each. All are timed
in turn in every round, forward with backward; the smallest times and their ratios are kept. The peer is the formula
in dask.array: einsum, softmax and einsum over all scores, forward only, because Dask does not differentiate.
"""

import json
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
from _common import parser
from distributed import Client, LocalCluster, wait

import polyattn as pa
from polyattn.distributed import dask as over_dask

HEADS, FEATURES = 8, 64


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--output", type=Path, default=Path("dask.json"))
    arguments.add_argument("--positions", type=int, default=16384)
    arguments.add_argument("--chunk", type=int, default=2048)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, HEADS, options.positions, FEATURES), dtype=np.float32) for _ in range(4)]
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as cluster,
        Client(cluster) as client,
    ):
        lazy = [da.from_array(x, chunks=(1, HEADS, options.chunk, FEATURES)) for x in arrays]
        there = client.persist(lazy)
        wait(there)
        ways = {
            "one process, forward": lambda: pa.attention(*arrays[:3], causal=True),
            "one process": lambda: one_process(*arrays),
            "Dask's threads": lambda: compute(graphs(*lazy)),
            "two workers": lambda: wait(client.persist(graphs(*there))),
            "dask.array formula, forward": lambda: compute([formula(*lazy[:3])]),
        }
        seconds = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, run in ways.items():
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
    found = {"n": options.positions, "chunk": options.chunk, "rounds": options.rounds, "seconds": seconds}
    options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def one_process(q, k, v, dout):
    _, cache = pa.attention_forward(q, k, v, causal=True)
    return pa.attention_backward(dout, cache)


def graphs(q, k, v, dout):
    out, cache = over_dask.attention_forward(q, k, v, causal=True)
    return [out, *over_dask.attention_backward(dout, cache)[:3]]


def compute(lazy):
    return dask.compute(*lazy, scheduler="threads", num_workers=2)


def formula(q, k, v):
    scores = da.einsum("bhid,bhjd->bhij", q, k) / np.float32(FEATURES**0.5)
    n = q.shape[2]
    allowed = da.arange(n, chunks=q.chunks[2])[:, None] >= da.arange(n, chunks=k.chunks[2])[None, :]
    scores = da.where(allowed, scores, np.float32(-np.inf))
    weights = da.exp(scores - scores.max(axis=-1, keepdims=True))
    return da.einsum("bhij,bhjd->bhid", weights / weights.sum(axis=-1, keepdims=True), v)


if __name__ == "__main__":
    main()
