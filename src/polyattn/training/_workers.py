"""The workers of Dask that share a training run: each computes the gradients of some samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..distributed._gradients import Gradients
from ..errors import EngineError
from ._config import OptionError
from ._processes import Processes, processes
from ._samples import Pairs

__all__ = ["Workers", "team_of"]


class Workers(NamedTuple):
    """The workers of a client of distributed. This process alone has the parameters and writes."""

    client: Any
    size: int
    first: bool = True
    alone: bool = False

    @property
    def what(self) -> str:
        """The workers in words."""
        return f"{self.size} workers of Dask"

    def expect_samples(self, batch: int) -> None:
        """Require a sample for each worker."""
        if batch < self.size:
            raise OptionError(f"--batch: expected at least one sample for each of {self.size} workers, got {batch}")

    def expect_same_step(self, step: int) -> None:
        """Require nothing: this process alone reads the checkpoint."""

    def share(self, pairs: Pairs) -> tuple[Pairs, float]:
        """Return the whole batch: it goes to the workers with the tasks."""
        return pairs, 1.0

    def gradients(
        self, function: Callable[..., Gradients], params: dict[str, Array], x: Array, y: Array, part: float,
        place: Callable[[np.ndarray[Any, Any]], Array],
    ) -> Gradients:  # fmt: skip
        """Return the means over the batch."""
        from ..distributed.dask import mean_gradients

        parts = min(self.size, len(x))  # the last batch of an epoch may be small
        return mean_gradients(function, params, x, y, parts=parts, client=self.client)


@contextmanager
def team_of(engine: str | None, workers: int | None) -> Iterator[Processes | Workers]:
    """Return the processes that share a run: workers of Dask, those that torchrun started, or one alone.

    The client of Dask connects to the scheduler of Dask's settings (``DASK_SCHEDULER_ADDRESS``), if there is one; else
    ``workers`` processes are started here.
    """
    if engine is None:
        if workers is not None:
            raise OptionError("--workers: they are of --engine dask; name the engine, too")
        with processes() as team:
            yield team
        return
    if engine != "dask":
        raise OptionError(f"--engine: expected dask, got {engine!r}; processes of torchrun need no option")
    if workers is not None and workers < 1:
        raise OptionError(f"--workers: expected at least 1, got {workers}")
    with _client(workers or 2) as client:
        yield Workers(client, workers or max(len(client.ncores()), 1))


@contextmanager
def _client(workers: int) -> Iterator[Any]:
    try:
        import dask
        import distributed
    except ImportError as error:
        raise EngineError('--engine dask: Dask is not installed; use pip install "polyattn[dask]"') from error
    if dask.config.get("scheduler-address", None):
        with distributed.Client() as client:
            yield client
        return
    quiet = {"dashboard_address": ":0", "silence_logs": "ERROR"}
    with (
        distributed.LocalCluster(n_workers=workers, threads_per_worker=1, **quiet) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client
