"""The process in which :func:`peak_memory` measures: ``python -m polyattn.bench._probe ORDER``."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..backend import Backend
from ..errors import PolyattnError
from ..selection import use_backend
from ._case import Case, Shape, parse_shape
from ._contestant import Peer
from ._memory import Memory
from ._ours import Ours
from ._peers import JITTED, PEERS
from ._report import OURS
from ._threads import announced, limited

TINY = 32


def main(order: dict[str, Any]) -> Memory:
    """Measure as the order says."""
    name, backend = order["peer"], order["backend"]
    case = Case(**{**order["case"], "shape": parse_shape(order["case"]["shape"])})
    with announced(order["threads"]):
        peer: Peer = Ours(backend, compiled=name == JITTED) if name in (OURS, JITTED) else PEERS[name]
        with limited(order["threads"], torch="torch" in (backend, peer.library)), use_backend(backend, "cpu"):
            return measured(peer, case, order["threads"])


def measured(peer: Peer, case: Case, threads: int) -> Memory:
    """Run once on a tiny problem, then watch one run of the case."""
    tiny = replace(case, shape=Shape(1, *case.shape[1:2], TINY, TINY, case.shape.d))
    peer.contestant(tiny, "cpu", threads).run()
    contestant = peer.contestant(case, "cpu", threads)
    if isinstance(peer, Ours) and type(peer.native).jit is not Backend.jit:
        contestant.run()  # compiles
    give_back()
    reset_peak()
    before = resident("VmRSS")
    results = contestant.run()
    peak = resident("VmHWM")
    return Memory(max(peak - before, 0), sum(x.nbytes for x in flat(results)))


def flat(results: Any) -> list[Any]:
    """Return the arrays of a result."""
    return list(results.values()) if isinstance(results, dict) else [results]


def give_back() -> None:
    """Return to the system what is free in this process, so that it is not used again unseen."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's own
        ctypes.CDLL(None).malloc_trim(0)
    time.sleep(0.05)


def reset_peak() -> None:
    """Let the high-water mark start anew; where the system does not let us, it is that of the process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident(field: str) -> int:
    """Return the resident set in bytes, now (VmRSS) or at its highest (VmHWM)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        raise PolyattnError("it is read from /proc/self/status, which only Linux has") from None


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1])).__dict__))
