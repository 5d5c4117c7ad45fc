"""Attention and training on a cluster of two worker processes, of which one is killed with SIGKILL in each part."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster, wait

import polyattn as pa
from polyattn import functional
from polyattn.distributed import dask as over_dask

LAYER = pa.MultiHeadAttention(8, 2, dtype="float64", seed=0)


def attention(client):
    """Return the largest error of the result and each gradient, whether a worker was killed, and the bytes here."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.normal(size=(2, n, 16)) for n in (64, 4096, 4096, 64))
    want, cache = pa.attention_forward(q, k, v, causal=True, q_offset=2000)
    grads = pa.attention_backward(dout, cache)
    lazy = [da.from_array(x, chunks=(1, 256 if x is k or x is v else 32, 16)) for x in (q, k, v, dout)]
    slow = [x.map_blocks(slowly, dtype=x.dtype, meta=x._meta) for x in lazy[:3]]
    out, lazy_cache = over_dask.attention_forward(*slow, causal=True, q_offset=2000)
    lazy_grads = over_dask.attention_backward(lazy[3], lazy_cache)
    found = {}
    for name, results, expected in (("forward", [out], [want]), ("backward", lazy_grads[:3], grads[:3])):
        part = "attention-part" if name == "forward" else "attention-d"
        done = client.persist(list(results))
        killed = kill_one(client, client.has_what, part)
        wait(done)
        errors = [float(np.abs(x.compute() - y).max()) for x, y in zip(done, expected, strict=True)]
        found[name] = {"error": max(errors), "killed": killed}
    return found


def slowly(x):
    time.sleep(0.02)
    return x


def kill_one(client, tasks, part, stop=None):
    """Kill a worker that has or computes results of that name; return whether there was one before ``stop`` was set."""
    while stop is None or not stop.is_set():
        for address, keys in tasks().items():
            if any(part in str(key) for key in keys):
                os.kill(client.run(os.getpid, workers=[address])[address], signal.SIGKILL)
                return True
        time.sleep(0.005)
    return False


def gradients(params, x, y):
    time.sleep(0.05)
    layer = LAYER.with_parameters(params)
    prediction, cache = layer.forward(x)
    loss, loss_cache = functional.mse_loss_forward(prediction, y)
    dprediction = functional.mse_loss_backward(np.ones_like(loss), loss_cache).prediction
    return loss, layer.backward(dprediction, cache, inputs=False)[1]


def training(client):
    """Return the largest difference of parameters from those of one process after six steps, and the steps."""
    optimiser = pa.optim.AdamW(0.01)
    rng = np.random.default_rng(1)
    batches = [(rng.normal(size=(7, 5, 8)), rng.normal(size=(7, 5, 8))) for _ in range(6)]

    def run(mean):
        params = LAYER.parameters()
        state = optimiser.init(params)
        for x, y in batches:
            _, grads = mean(params, x, y)
            params, state = optimiser.update(grads, state, params)
        return params, state

    want, _ = run(gradients)
    stop, killed = threading.Event(), []
    killer = threading.Thread(target=lambda: killed.append(kill_one(client, client.processing, "share", stop)))
    killer.start()
    params, state = run(lambda *given: over_dask.mean_gradients(gradients, *given, parts=5, client=client))
    stop.set()
    killer.join()
    difference = max(float(np.abs(params[name] - want[name]).max()) for name in want)
    return {"error": difference, "steps": int(state["step"]), "killed": killed[0]}


def main():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0", silence_logs=50) as cluster,
        Client(cluster) as client,
    ):  # fmt: skip
        found = {"attention": attention(client), "training": training(client)}
    print(json.dumps({**found, "dead": dead_scheduler()}))


def dead_scheduler():
    """Return what a call raises whose client has lost its scheduler, which SIGKILL ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/scheduler.json"
        command = ["-m", "distributed.cli.dask_scheduler", "--scheduler-file", file, "--port", "0", "--no-dashboard"]
        scheduler = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)
        client = Client(scheduler_file=file, timeout=60)
    scheduler.kill()
    scheduler.wait()
    while client.status == "running":
        time.sleep(0.01)
    try:
        pa.attention(np.ones((4, 8)), np.ones((4, 8)), np.ones((4, 8)), backend="dask")
    except pa.PolyattnError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        client.close(timeout=1)
    return "nothing"


if __name__ == "__main__":
    main()
