"""The comparison: prepare, check that results agree, time in turns, and measure memory."""

from __future__ import annotations

import functools
import itertools
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from .. import __version__, registry
from ..backend import Backend
from ..errors import ArgumentError, PolyattnError
from ..selection import selected, use_backend
from ._agreement import TOLERANCE, difference
from ._case import Case
from ._contestant import Peer, Results
from ._machine import Others, available_memory, machine
from ._memory import peak_memory
from ._ours import Ours
from ._peers import named, present
from ._race import quiet, race
from ._report import Report, Row, rated
from ._threads import announced, cores, limited

__all__ = ["compare"]

Progress = Callable[[str, float], None]


def compare(
    cases: Sequence[Case],
    *,
    backend: str | None = None,
    device: str | None = None,
    peers: Sequence[str] | None = None,
    rounds: int = 7,
    threads: int | None = None,
    memory: bool = False,
    progress: Progress = lambda doing, done: None,
    clock: Callable[[], float] = time.perf_counter,
    rest: Callable[[], None] = quiet,
) -> Report:
    """Time polyattn on a backend against its peers, all in this process, in turns.

    Parameters
    ----------
    cases : sequence of Case
        Of one task.
    backend, device : str, optional
        Where polyattn computes: by default the selection in force, else NumPy, on its first device.
    peers : sequence of str, optional
        Whom to compare with; by default all that are installed.
    rounds : int
        Each median is over so many turns.
    threads : int, optional
        Of every library; by default as many as this process has cores.
    memory : bool
        Whether to measure memory as well, each contestant on each case in a process of its own.
    progress : callable
        Is told what is being done, and how much of all is done, from 0 to 1.
    clock, rest : callable
        What tells the seconds, and what is done before each turn.

    Returns
    -------
    Report
        A peer whose results differ from polyattn's is not timed: its row says so.

    Raises
    ------
    ArgumentError
        If an argument is outside of what it may be.
    UnknownBackendError, BackendUnavailableError
        If the backend, or a peer that was asked for, cannot be used.
    """
    if not cases or len({case.task for case in cases}) > 1:
        raise ArgumentError(f"cases: expected some of one task, got {[case.task for case in cases]}")
    threads = cores() if threads is None else threads
    if rounds < 1 or threads < 1:
        raise ArgumentError(f"rounds, threads: expected 1 or more, got {rounds}, {threads}")
    names = named(peers, cases[0].task)
    with announced(threads) as of_jax:
        selection = selected(backend, device)
        native = registry.ready("numpy" if selection is None else selection.backend)
        device = (selection.device if selection else None) or native.devices()[0]
        others, absent = present(names, native.name, required=peers is not None)
        others_meanwhile = Others()
        threads_of = _threads_of({"numpy", native.name, *(peer.library for peer in others)}, threads, of_jax)
        comparison = _Comparison(
            Ours(native.name), others, device, threads, rounds, memory, progress,
            functools.partial(race, clock=clock, rest=rest),
        )  # fmt: skip
        rows: list[Row] = []
        with limited(threads, torch="torch" in threads_of), use_backend(native.name, device):
            for index, case in enumerate(cases):
                rows += comparison.rows(case, (index / len(cases), (index + 1) / len(cases)))
        versions = _versions(native, others)
        found = {**machine(device), "others": others_meanwhile.share()}
    return Report(cases[0].task, native.name, device, rounds, threads_of, found, versions, absent, tuple(rows))


@dataclass(frozen=True)
class _Comparison:
    """polyattn, its peers, and how they are compared."""

    ours: Ours
    peers: Sequence[Peer]
    device: str
    threads: int
    rounds: int
    memory: bool
    progress: Progress
    race: Callable[..., dict[str, list[float]]]

    def rows(self, case: Case, span: tuple[float, float]) -> list[Row]:
        """Return a row for polyattn and for each peer that does such cases; ``span`` is their part of the progress."""
        about, (begin, end) = f"{case.shape} {case.what}", span
        self.progress(f"{about}: checking", begin)
        contestant = self.ours.contestant(case, self.device, self.threads)
        reference = contestant.fetch(contestant.run())
        judged, runs = [Row.of(case, self.ours.name, error=0.0)], {self.ours.name: contestant.run}
        for peer in self.peers:
            if case.what in peer.kinds:
                row, run = self._judged(peer, case, reference)
                judged.append(row)
                runs |= {} if run is None else {peer.name: run}
        turns = itertools.count()

        def say(name: str) -> None:
            share = next(turns) / (len(runs) * self.rounds)
            self.progress(f"{about}: {name}", begin + share * (end - begin))

        rows = rated(judged, self.race(runs, self.rounds, before_turn=say))
        return [self._weighed(row, case, end) for row in rows] if self.memory else rows

    def _judged(self, peer: Peer, case: Case, reference: Results) -> tuple[Row, Callable[[], Any] | None]:
        """Return a peer's row before it is timed, and what to time; None where it fails or differs."""

        def refused(note: str, error: float | None = None) -> tuple[Row, None]:
            return Row.of(case, peer.name, note=note, error=error), None

        if (reason := self._obstacle(peer, case)) is not None:
            return refused(f"not run: {reason}")
        try:
            contestant = peer.contestant(case, self.device, self.threads)
            error = difference(reference, contestant.fetch(contestant.run()))
        except Exception as failure:
            return refused(f"failed: {type(failure).__name__}: {str(failure).strip().partition(chr(10))[0]}")
        if not error <= TOLERANCE[case.dtype]:
            finite = error if math.isfinite(error) else None
            return refused(f"not timed: its results differ from polyattn's by {error:.1e}", finite)
        return Row.of(case, peer.name, error=error), contestant.run

    def _obstacle(self, peer: Peer, case: Case) -> str | None:
        """Return why a peer is not even tried."""
        if (reason := peer.unsuited(case, self.device)) is not None:
            return reason
        need, room = peer.scores_held(case) * case.shape.scores * case.itemsize, available_memory()
        if self.device == "cpu" and room and need > room // 2:
            return f"its scores would take {need / 2**30:.0f} GiB, and {room / 2**30:.0f} GiB are free"
        return None

    def _weighed(self, row: Row, case: Case, done: float) -> Row:
        """Add the memory of a contestant that was timed."""
        if row.milliseconds is None:
            return row
        self.progress(f"{case.shape} {case.what}: memory of {row.peer}", done)
        try:
            memory = peak_memory(row.peer, case, self.ours.native.name, self.device, self.threads)
        except PolyattnError as error:
            return replace(row, note=str(error))
        return replace(row, memory_mib=round(memory.peak / 2**20, 3))


def _versions(native: Backend, peers: Sequence[Peer]) -> dict[str, str]:
    """Return the releases of everything that took part."""
    blas = {pool["internal_api"]: str(pool["version"]) for pool in threadpool_info() if pool["user_api"] == "blas"}
    return {
        "python": platform.python_version(),
        "polyattn": __version__,
        "numpy": np.__version__,
        **blas,
        native.name: native.status().version,
        **{peer.library: peer.version() for peer in peers if not isinstance(peer, Ours)},
    }


def _threads_of(libraries: set[str], threads: int, of_jax: str) -> dict[str, str]:
    """Return how many threads each library has, and by what."""
    told = {
        "numpy": f"{threads}, by threadpoolctl",
        "torch": f"{threads}, by torch.set_num_threads",
        "onnxruntime": f"{threads}, by its session's options",
        "jax": of_jax,
    }
    return {name: how for name, how in told.items() if name in libraries}
