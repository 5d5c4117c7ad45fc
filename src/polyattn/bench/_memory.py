"""Peak memory of one call, in a process of its own.

What is measured: the highest resident set during the call, less the resident set before it. The process is fresh; the
inputs are there already, the libraries are loaded, and the same code has run on a tiny problem before; where a
backend compiles for each shape it has also run once on this one, and what that left was given back to the system.
Results count: ``beyond`` is what is needed besides them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

from ..errors import PolyattnError
from ._case import Case

__all__ = ["Memory", "peak_memory"]


@dataclass(frozen=True)
class Memory:
    """Bytes: ``peak`` above what there was before the call, and ``results``, the size of what it returned."""

    peak: int
    results: int

    @property
    def beyond(self) -> int:
        """What the call needed besides its inputs and its results."""
        return self.peak - self.results


def peak_memory(peer: str, case: Case, backend: str, device: str, threads: int) -> Memory:
    """Measure a contestant, on Linux.

    Parameters
    ----------
    peer : str
        ``"polyattn"``, ``"polyattn-jit"`` or a peer's name.
    case : Case
        What it computes.
    backend, device : str
        Where polyattn computes.
    threads : int
        For every library.

    Raises
    ------
    PolyattnError
        If the process fails, or is killed for want of memory; or on a device, where this says nothing.
    """
    if device != "cpu":
        raise PolyattnError(f"memory: the resident set says nothing of {device}")
    order = {"peer": peer, "case": {**asdict(case), "shape": str(case.shape)}, "backend": backend, "threads": threads}
    command = [sys.executable, "-m", "polyattn.bench._probe", json.dumps(order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise PolyattnError(f"memory: {peer} on {case.shape} could not be measured: {said}")
    return Memory(**json.loads(done.stdout.splitlines()[-1]))
