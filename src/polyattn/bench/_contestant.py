"""Peers, the libraries that are compared, and contestants: polyattn or a peer, prepared for one case."""

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
"""AdamW's settings in a training step. With a smaller eps the first update is the sign of the gradient, which is
arbitrary for a gradient that is zero except for rounding errors: results could not be compared."""

NO_GRADIENT = "k_proj.bias"  # the softmax is invariant to it: its gradient is only rounding error, so not compared


class Contestant(NamedTuple):
    """An implementation of a case, with its inputs on its device.

    ``run`` computes it once and waits for the results, a dict; ``fetch`` copies them to the host under common names:
    ``out``, ``dq``, ``dk``, ``dv`` of attention; ``y``, ``dx`` and ``d`` with a parameter's name of a layer; the new
    parameters of a training step.
    """

    run: Callable[[], Any]
    fetch: Callable[[Any], Inputs]


def contestant(
    call: Callable[..., dict[str, Array]],
    inputs: Mapping[str, Any],
    to_host: Callable[[Any], Any],
    wait: Callable[[dict[str, Array]], Any] = lambda results: None,
) -> Contestant:
    """Return the contestant that calls a function with these inputs by name."""

    def run() -> dict[str, Array]:
        results = call(**inputs)
        wait(results)
        return results

    def fetch(results: dict[str, Array]) -> Inputs:
        return {name: to_host(x) for name, x in results.items() if not name.endswith(NO_GRADIENT)}

    return Contestant(run, fetch)


@dataclass(frozen=True)
class Peer:
    """A library, or one of its functions, that computes the same as polyattn."""

    name: str
    library: str
    """The module that must be installed."""
    contestant: Callable[[Case, str, int], Contestant]
    """Prepares a case on a device; the number of threads is for libraries in which it is not set globally."""
    extra: str = ""
    """The extra of polyattn that installs it."""
    tasks: tuple[str, ...] = ("attention",)
    kinds: tuple[str, ...] = ("forward", "both", "step")
    dtypes: tuple[str, ...] = ("float32", "float64")
    devices: tuple[str, ...] | None = ("cpu",)
    """The types of devices, ``cuda`` for ``cuda:0``; None means all."""
    scores_held: tuple[int, int] = (0, 0)
    """The measured number of arrays with all scores that are in memory at once, in the forward and in both."""
    needs: tuple[str, ...] = ()
    """Other modules that must be installed, from the same extra."""
    fault: Callable[[], str | None] = lambda: None
    """Returns why it cannot be used although it is installed, or None."""

    def missing(self) -> str | None:
        """Return why it cannot be used on this machine, or None."""
        for module in (self.library, *self.needs):
            if importlib.util.find_spec(module) is None:
                return f'{module} is not installed: pip install "polyattn[{self.extra}]"'
        return self.fault()

    def version(self) -> str:
        """Return the version of the library."""
        return str(importlib.import_module(self.library).__version__)

    def unsuited(self, case: Case, device: str) -> str | None:
        """Return why it cannot compute this case, or None."""
        if case.task not in self.tasks or case.what not in self.kinds:
            return f"it has no {case.task} {case.what}"
        if case.dtype not in self.dtypes:
            return f"it does not compute in {case.dtype}"
        kind = device.partition(":")[0]
        return None if self.devices is None or kind in self.devices else f"it does not compute on {kind}"


def index_of(device: str) -> int:
    """Return the number of a device: 1 of ``cuda:1``."""
    return int(device.partition(":")[2] or 0)
