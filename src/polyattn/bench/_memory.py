"""Peak memory of one call.

On the host it is the maximal resident set during the call, less the resident set before it, in a new process. Before
the call the inputs are created, the libraries are loaded, and the same code has run on a tiny problem. If a backend
compiles for each shape, the call has also run once, and the freed memory was returned to the system. Results are
included; ``beyond`` excludes them. On a CUDA device it is measured in this process, by the allocators of CuPy and
torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from .. import registry
from .._resident import reset_peak, resident
from ..errors import PolyattnError
from ..selection import use_backend
from ._case import Case, Shape, parse_shape
from ._contestant import Peer
from ._ours import JITTED, OURS, compiles
from ._peers import peer_named
from ._threads import announced, limited

__all__ = ["Memory", "device_memory", "peak_memory"]

CODE = "import sys; from polyattn.bench import _memory; _memory.measure(sys.argv[1])"
TINY = 32


class Memory(NamedTuple):
    """Bytes: ``peak``, the maximal memory less that before the call, and ``results``, the size of the results."""

    peak: int
    results: int

    @property
    def beyond(self) -> int:
        """The memory of the call without its inputs and results."""
        return self.peak - self.results


def peak_memory(peer: str, case: Case, backend: str, device: str, threads: int) -> Memory:
    """Measure ``"polyattn"`` on a backend, ``"polyattn-jit"`` or a peer by name, on Linux.

    Raises
    ------
    PolyattnError
        If the process fails, or is killed because memory runs out; or if the device is not the CPU.
    """
    if device != "cpu":
        raise PolyattnError(f"memory: the resident set does not include the memory of {device}")
    order = {"peer": peer, "case": {**asdict(case), "shape": str(case.shape)}, "backend": backend, "threads": threads}
    command = [sys.executable, "-c", CODE, json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise PolyattnError(f"memory: {peer} on {case.shape} could not be measured: {said}")
    return Memory(*json.loads(done.stdout.splitlines()[-1]))


def device_memory(run: Callable[[], Any]) -> int:
    """Return the increase of the memory of CuPy's pool and torch's allocator in a run, in bytes, with results."""
    pool = sys.modules["cupy"].get_default_memory_pool() if "cupy" in sys.modules else None
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if pool is not None:
        pool.free_all_blocks()
    before = (pool.total_bytes() if pool else 0) + (torch.cuda.memory_allocated() if torch else 0)
    run()
    after = (pool.total_bytes() if pool else 0) + (torch.cuda.max_memory_allocated() if torch else 0)
    return int(after - before)


def measure(order: str) -> None:
    """Measure in this process for :func:`peak_memory`, print the result, and exit."""
    asked = json.loads(order)
    name, backend, threads = asked["peer"], asked["backend"], asked["threads"]
    case = Case(**{**asked["case"], "shape": parse_shape(asked["case"]["shape"])})
    with announced(threads):
        peer = peer_named(name, backend)
        compiled = name in (OURS, JITTED) and compiles(registry.ready(backend))
        with limited(threads, torch="torch" in (backend, peer.library)), use_backend(backend, "cpu"):
            print(json.dumps(_watched(peer, case, threads, compiled)), flush=True)
    os._exit(0)  # at a normal exit of the interpreter, XLA's threads sometimes abort the process


def _watched(peer: Peer, case: Case, threads: int, compiled: bool) -> Memory:
    """Run once on a tiny problem, then measure one run of the case."""
    tiny = replace(case, shape=Shape(1, case.shape.heads, TINY, TINY, case.shape.d))
    peer.contestant(tiny, "cpu", threads).run()
    contestant = peer.contestant(case, "cpu", threads)
    if compiled:
        contestant.run()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only: return free memory to the system
        ctypes.CDLL(None).malloc_trim(0)
    time.sleep(0.05)
    with contextlib.suppress(OSError):  # reset VmHWM, if the system allows it
        reset_peak()
    before = resident("VmRSS")
    results = contestant.run()
    return Memory(max(resident("VmHWM") - before, 0), sum(x.nbytes for x in results.values()))
