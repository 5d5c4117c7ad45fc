"""What takes part: a way to compute a case, whoever it is from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from numpy.typing import NDArray

from ._case import Case

__all__ = ["NO_GRADIENT", "OPTIMISER", "Contestant", "Peer", "Results"]

Results = dict[str, NDArray[Any]]

NO_GRADIENT = "k_proj.bias"
"""Softmax does not see what all keys share: this gradient is rounding, and is compared with nobody's."""

OPTIMISER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-4, "weight_decay": 0.01}
"""AdamW's settings in a training step. With a smaller eps the first step would be the signs of the gradients, and those
of a zero gradient are rounding: results could not be compared."""


class Contestant(NamedTuple):
    """A case, ready to be computed: its inputs lie where they are used.

    ``run`` computes it once and waits for the result; ``fetch`` brings the result of a run to the host, each array
    under the name by which it is compared: ``out``, ``dq``, ``dk``, ``dv`` of attention; ``y``, ``dx`` and ``d`` with
    a parameter's name of a layer; the new parameters of a training step.
    """

    run: Callable[[], Any]
    fetch: Callable[[Any], Results]


class Peer:
    """A library, or a function of it, that computes what polyattn computes."""

    name: ClassVar[str]
    library: ClassVar[str]
    """The module that has to be there; the package has its name too."""
    extra: ClassVar[str] = ""
    """The extra of polyattn that installs it."""
    tasks: ClassVar[tuple[str, ...]] = ("attention",)
    kinds: ClassVar[tuple[str, ...]] = ("forward", "both", "step")
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """The kinds of device, ``cuda`` for ``cuda:0``."""

    def missing(self) -> str | None:
        """Return why it cannot be used on this machine, or None."""
        if importlib.util.find_spec(self.library) is None:
            return f'{self.library} is not installed: pip install "polyattn[{self.extra}]"'
        return None

    def version(self) -> str:
        """Return the release of the library."""
        return importlib.metadata.version(self.library)

    def unsuited(self, case: Case, device: str) -> str | None:
        """Return why it does not compute this case, or None."""
        if case.task not in self.tasks or case.what not in self.kinds:
            return f"it has no {case.task} {case.what}"
        if case.dtype not in self.dtypes:
            return f"it does not compute in {case.dtype}"
        kind = device.partition(":")[0]
        return None if kind in self.devices else f"it does not compute on {kind}"

    def scores_held(self, case: Case) -> int:
        """Return how many arrays of all scores it holds at once, of which there may be too many for the memory."""
        return 0

    def contestant(self, case: Case, device: str, threads: int) -> Contestant:
        """Prepare a case; ``threads`` is for libraries that are told of it nowhere else."""
        raise NotImplementedError
