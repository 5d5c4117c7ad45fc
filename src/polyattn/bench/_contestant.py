"""What is compared: a way to compute a case, by any library."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..backend import Array
from ._case import Case, Inputs

__all__ = ["OPTIMISER", "Contestant", "Peer", "contestant", "index_of"]

OPTIMISER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.01}
"""AdamW's settings in a training step. With a smaller eps the first step would be the signs of the gradients, and those
of a zero gradient are rounding: results could not be compared."""

NO_GRADIENT = "k_proj.bias"  # the softmax cancels it: its gradient is rounding, and is not compared


class Contestant(NamedTuple):
    """A case, ready to be computed: its inputs lie where they are used.

    ``run`` computes it once and waits for the results, a dict; ``fetch`` brings them to the host under the names by
    which they are compared: ``out``, ``dq``, ``dk``, ``dv`` of attention; ``y``, ``dx`` and ``d`` with a parameter's
    name of a layer; the new parameters of a training step.
    """

    run: Callable[[], Any]
    fetch: Callable[[Any], Inputs]


def contestant(
    call: Callable[..., dict[str, Array]],
    inputs: Mapping[str, Any],
    to_host: Callable[[Any], Any],
    wait: Callable[[dict[str, Array]], Any] = lambda results: None,
) -> Contestant:
    """Return the contestant that calls a function on these inputs by name."""

    def run() -> dict[str, Array]:
        results = call(**inputs)
        wait(results)
        return results

    def fetch(results: dict[str, Array]) -> Inputs:
        return {name: to_host(x) for name, x in results.items() if not name.endswith(NO_GRADIENT)}

    return Contestant(run, fetch)


@dataclass(frozen=True)
class Peer:
    """A library, or a function of it, that computes what polyattn computes."""

    name: str
    library: str
    """The module that has to be there."""
    contestant: Callable[[Case, str, int], Contestant]
    """Prepares a case on a device; the threads are for libraries that are not told of them elsewhere."""
    extra: str = ""
    """The extra of polyattn that installs it."""
    tasks: tuple[str, ...] = ("attention",)
    kinds: tuple[str, ...] = ("forward", "both", "step")
    dtypes: tuple[str, ...] = ("float32", "float64")
    devices: tuple[str, ...] | None = ("cpu",)
    """The kinds of device, ``cuda`` for ``cuda:0``; None is any."""
    scores_held: tuple[int, int] = (0, 0)
    """How many arrays of all scores the forward, and both, hold at once, as measured."""
    needs: tuple[str, ...] = ()
    """Other modules, of the same extra."""
    fault: Callable[[], str | None] = lambda: None
    """Says why it cannot be used although it is installed."""

    def missing(self) -> str | None:
        """Return why it cannot be used on this machine, or None."""
        for module in (self.library, *self.needs):
            if importlib.util.find_spec(module) is None:
                return f'{module} is not installed: pip install "polyattn[{self.extra}]"'
        return self.fault()

    def version(self) -> str:
        """Return the release of the library."""
        return str(importlib.import_module(self.library).__version__)

    def unsuited(self, case: Case, device: str) -> str | None:
        """Return why it does not compute this case, or None."""
        if case.task not in self.tasks or case.what not in self.kinds:
            return f"it has no {case.task} {case.what}"
        if case.dtype not in self.dtypes:
            return f"it does not compute in {case.dtype}"
        kind = device.partition(":")[0]
        return None if self.devices is None or kind in self.devices else f"it does not compute on {kind}"


def index_of(device: str) -> int:
    """Return the number of a device: 1 of ``cuda:1``."""
    return int(device.partition(":")[2] or 0)
