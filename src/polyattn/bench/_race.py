"""Timing in interleaved rounds, so that other load on the machine affects all contestants equally."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["quiet", "race"]

LEAST_TURN = 0.010
"""The least seconds of one measurement: shorter runs are repeated, and the mean is the result."""
WARM_UP = 0.060
"""Seconds of untimed runs before a measurement: after a pause the scheduler needs tens of milliseconds to put each
thread on its own core (a run of 20 ms on two threads took 38 ms)."""
LONG = 0.5
"""A run of at least this many seconds needs no warm-up."""

Clock = Callable[[], float]


def race(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Clock = time.perf_counter,
    rest: Callable[[], None] = lambda: quiet(),
    before_turn: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """Return the seconds of one run by contestant, one number for each round.

    In every round each contestant is measured once, its turn, and each round begins with another contestant. Before a
    turn, ``before_turn`` is called with its name, and then ``rest``, by default :func:`quiet`. Then the contestant runs
    untimed for a while, which distributes its threads over the cores and fills the caches. Garbage collection is
    disabled.
    """
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with _no_garbage_collection():
        turns = {}
        for name in names:
            rest()
            turns[name] = _turn(runs[name], clock)
        for round_ in range(rounds):
            first = round_ % len(names)
            for name in names[first:] + names[:first]:
                before_turn(name)
                rest()
                untimed, timed = turns[name]
                _timed(runs[name], untimed, clock)
                seconds[name].append(_timed(runs[name], timed, clock) / timed)
    return seconds


def quiet(patience: float = 0.5, step: float = 0.005) -> None:
    """Wait until the other threads of this process sleep, at most ``patience`` seconds.

    After its work a thread pool keeps its cores busy for a while: OpenBLAS for 100 ms, onnxruntime for 50 ms, OpenMP
    for 5 ms, as measured. This would slow the next contestant down.
    """
    end = time.perf_counter() + patience
    while time.perf_counter() < end:
        busy = time.process_time()
        time.sleep(step)
        if time.process_time() - busy < step / 5:
            return


def _turn(run: Callable[[], Any], clock: Clock) -> tuple[int, int]:
    """Return the numbers of untimed and of timed runs of a contestant in each turn."""
    timed = 1
    while (elapsed := _timed(run, timed, clock)) < LEAST_TURN:
        wanted = LEAST_TURN / max(elapsed / timed, 1e-7)
        timed = max(timed + 1, min(int(wanted * 1.2), 10 * timed))
    once = elapsed / timed
    return 0 if once >= LONG else math.ceil(WARM_UP / once), timed


def _timed(run: Callable[[], Any], repetitions: int, clock: Clock) -> float:
    begin = clock()
    for _ in range(repetitions):
        run()
    return clock() - begin


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
