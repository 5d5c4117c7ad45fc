"""The comparison: check that results agree, time in interleaved rounds, and measure memory."""

from __future__ import annotations

import functools
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from .. import __version__, registry
from ..errors import ArgumentError, BackendUnavailableError, PolyattnError
from ..selection import selected, use_backend
from ._case import Case, Inputs
from ._contestant import Peer
from ._machine import Others, available_memory, machine
from ._memory import device_memory, peak_memory
from ._ours import JITTED, OURS, ours
from ._peers import present
from ._race import quiet, race
from ._threads import announced, cores, limited

__all__ = ["Report", "Row", "compare"]

TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}
"""The largest difference from the reference, relative to the largest element of the same array."""


@dataclass(frozen=True)
class Row:
    """One contestant on one case.

    ``milliseconds`` is the median of the rounds, ``ratio`` the peer's median divided by polyattn's (above 1 polyattn
    is faster), ``error`` the largest difference from the reference relative to its largest element, and
    ``memory_mib`` the peak memory of the call. A value that was not measured is None; ``note`` has the reason.
    """

    peer: str
    shape: str
    what: str
    causal: bool
    dtype: str
    milliseconds: float | None = None
    ratio: float | None = None
    error: float | None = None
    memory_mib: float | None = None
    note: str = ""

    @classmethod
    def of(cls, case: Case, peer: str, **found: Any) -> Row:
        """Return the row of a contestant on a case."""
        return cls(peer, str(case.shape), case.what, case.causal, case.dtype, **found)


@dataclass(frozen=True)
class Report:
    """The result of a comparison: its settings, the machine, and a row for each contestant on each case."""

    task: str
    backend: str
    device: str
    rounds: int
    threads: dict[str, str]
    machine: dict[str, Any]
    versions: dict[str, str]
    absent: dict[str, str]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts and lists, for JSON."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


def compare(
    cases: Sequence[Case],
    *,
    backend: str | None = None,
    device: str | None = None,
    peers: Sequence[str] | None = None,
    rounds: int = 7,
    threads: int | None = None,
    memory: bool = False,
    arrays: str | None = None,
    reference: Callable[[Case], Inputs] | None = None,
    progress: Callable[[str, float], None] = lambda doing, done: None,
    clock: Callable[[], float] = time.perf_counter,
    rest: Callable[[], None] = quiet,
) -> Report:
    """Time polyattn on a backend and its peers, all in this process, in interleaved rounds.

    Parameters
    ----------
    cases : sequence of Case
        All of one task.
    backend, device : str, optional
        Where polyattn computes: by default the selected place, else NumPy, on its first device.
    peers : sequence of str, optional
        The peers to compare with; by default all that are installed.
    rounds : int
        The number of rounds, whose median is reported.
    threads : int, optional
        The number of threads of each library; by default that of the cores of this process.
    memory : bool
        Whether to measure memory too; on the host, in a new process for each contestant and case.
    arrays : str, optional
        The library of polyattn's input arrays; by default the backend's own.
    reference : callable, optional
        Returns the expected results of a case; by default polyattn's results are the reference.
    progress : callable
        Called with a description of the current work, and the finished fraction, from 0 to 1.
    clock, rest : callable
        Functions that return the time in seconds, and that are called before each measurement.

    Returns
    -------
    Report
        A contestant whose results differ from the reference is not timed; its row has a note.

    Raises
    ------
    ArgumentError
        If an argument is not valid.
    UnknownBackendError, BackendUnavailableError
        If the backend, or one of ``peers``, cannot be used.
    """
    if not cases or len({case.task for case in cases}) > 1:
        raise ArgumentError(f"cases: expected some of one task, got {[case.task for case in cases]}")
    threads = cores() if threads is None else threads
    if rounds < 1 or threads < 1:
        raise ArgumentError(f"rounds, threads: expected 1 or more, got {rounds}, {threads}")
    task = cases[0].task
    with announced(threads) as of_jax:
        selection = selected(backend, device)
        native = registry.ready("numpy" if selection is None else selection.backend)
        device = (selection.device if selection else None) or native.devices()[0]
        others, absent = present(peers, task, native.name)
        others_meanwhile = Others()
        libraries = {"numpy": np.__version__, native.name: native.status().version}
        libraries |= {peer.library: peer.version() for peer in others if peer.name != JITTED}
        timed = functools.partial(race, rounds=rounds, clock=clock, rest=rest)
        comparison = _Comparison(
            ours(native.name, arrays), others, device, threads, memory, reference, progress, timed, rounds
        )
        rows: list[Row] = []
        with limited(threads, torch="torch" in libraries), use_backend(native.name, device):
            for index, case in enumerate(cases):
                rows += comparison.rows(case, (index / len(cases), (index + 1) / len(cases)))
        found = {**machine(device), "others": others_meanwhile.share()}
    progress("done", 1.0)
    how = _threads_of(libraries, threads, of_jax)
    return Report(task, native.name, device, rounds, how, found, _versions(libraries), absent, tuple(rows))


@dataclass(frozen=True)
class _Comparison:
    """polyattn, its peers, and the settings of the comparison."""

    ours: Peer
    peers: Sequence[Peer]
    device: str
    threads: int
    memory: bool
    reference: Callable[[Case], Inputs] | None
    progress: Callable[[str, float], None]
    race: Callable[..., dict[str, list[float]]]
    rounds: int

    def rows(self, case: Case, span: tuple[float, float]) -> list[Row]:
        """Return a row for polyattn and for each peer with such cases; ``span`` is their interval of the progress."""
        about, (begin, end) = f"{case.shape} {case.what}", span
        self.progress(f"{about}: checking", begin)
        rows, runs = self._judged(case)
        turns = itertools.count()

        def say(name: str) -> None:
            self.progress(f"{about}: {name}", begin + next(turns) / (len(runs) * self.rounds) * (end - begin))

        seconds = self.race(runs, before_turn=say) if runs else {}
        medians = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
        return [self._measured(row, case, medians, runs, end) for row in rows]

    def _judged(self, case: Case) -> tuple[list[Row], dict[str, Callable[[], Any]]]:
        """Return the rows without times, and the functions to time: those whose results agree with the reference."""
        rows: list[Row] = []
        runs: dict[str, Callable[[], Any]] = {}
        right = None if self.reference is None else self.reference(case)
        for peer in (self.ours, *(peer for peer in self.peers if case.what in peer.kinds)):
            error, note = None, self._obstacle(peer, case)
            try:
                if not note:
                    contestant = peer.contestant(case, self.device, self.threads)
                    results = contestant.fetch(contestant.run())
                    right = results if right is None else right
                    error = difference(right, results)
            except BackendUnavailableError as failure:
                note = f"not run: {failure}"
            except Exception as failure:
                if right is None:  # polyattn itself failed, whose results are the reference
                    raise
                note = f"failed: {type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}"
            if error is not None and not error <= TOLERANCE[case.dtype]:
                whose = "polyattn's" if self.reference is None else "the reference"
                note = f"not timed: its results differ from {whose} by {error:.1e}"
                error = error if math.isfinite(error) else None
            rows.append(Row.of(case, peer.name, error=error, note=note))
            if not note:
                runs[peer.name] = contestant.run
        return rows, runs

    def _obstacle(self, peer: Peer, case: Case) -> str:
        """Return why a peer cannot compute a case, or an empty string."""
        if (reason := peer.unsuited(case, self.device)) is not None:
            return f"not run: {reason}"
        held = peer.scores_held[case.what == "both"]
        need, room = held * case.shape.scores * case.itemsize, available_memory()
        if self.device == "cpu" and room and need > room // 2:
            return f"not run: its scores would take {need / 2**30:.0f} GiB, and {room / 2**30:.0f} GiB are free"
        return ""

    def _measured(
        self, row: Row, case: Case, medians: Mapping[str, float], runs: Mapping[str, Callable[[], Any]], done: float
    ) -> Row:
        """Add to a row the time, the ratio to polyattn's time, and the memory, if the contestant was timed."""
        if row.peer not in medians:
            return row
        median = medians[row.peer]
        row = replace(row, milliseconds=median, ratio=median / medians[OURS] if OURS in medians else None)
        if not self.memory:
            return row
        self.progress(f"{case.shape} {case.what}: memory of {row.peer}", done)
        try:
            if self.device.startswith("cuda") and self.ours.library != "jax" and row.peer != "jax":
                peak = device_memory(runs[row.peer])
            else:
                peak = peak_memory(row.peer, case, self.ours.library, self.device, self.threads).peak
        except PolyattnError as error:
            return replace(row, note=str(error))
        return replace(row, memory_mib=round(peak / 2**20, 3))


def difference(right: Inputs, results: Inputs) -> float:
    """Return the largest |results − right| / max|right| over the arrays; NaN if only one of both is finite."""
    if right.keys() != results.keys():
        raise ValueError(f"expected the results {sorted(right)}, got {sorted(results)}")
    worst = 0.0
    for name, x in right.items():
        if results[name].shape != x.shape:
            raise ValueError(f"{name}: expected shape {x.shape}, got {results[name].shape}")
        with np.errstate(all="ignore"):
            error = np.max(np.abs(results[name] - x)) / max(float(np.max(np.abs(x))), np.finfo(x.dtype).tiny)
        worst = max(worst, float(error)) if not np.isnan(error) else np.nan
    return float(worst)


def _versions(libraries: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of Python, polyattn, the BLAS and the libraries."""
    blas = {pool["internal_api"]: str(pool["version"]) for pool in threadpool_info() if pool["user_api"] == "blas"}
    return {"python": platform.python_version(), "polyattn": __version__, **blas, **libraries}


def _threads_of(libraries: Mapping[str, str], threads: int, of_jax: str) -> dict[str, str]:
    """Return the number of threads of each library, and how it is set."""
    set_by = {
        "numpy": f"{threads}, by threadpoolctl",
        "torch": f"{threads}, by torch.set_num_threads",
        "onnxruntime": f"{threads}, by its session's options",
        "jax": of_jax,
    }
    return {name: how for name, how in set_by.items() if name in libraries}
