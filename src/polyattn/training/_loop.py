"""The loop over the steps."""

from __future__ import annotations

import shlex
import time

import numpy as np

from ..backend import Array
from ..errors import CheckpointError, PolyattnError
from ._folder import Folder
from ._model import Model
from ._progress import Reporter
from ._step import Arrays
from ._task import Data

__all__ = ["DivergedError", "Loop"]

# Losses are fetched together: to look at one is to wait for the device.
MOST_STEPS, MOST_SECONDS = 50, 0.25


class DivergedError(PolyattnError, ArithmeticError):
    """The loss or a parameter is not finite any more."""


class Loop:
    """Steps, logged and checkpointed on the way."""

    def __init__(self, model: Model, data: Data, folder: Folder, reporter: Reporter, checkpoint_every: int) -> None:
        self._model, self._data, self._folder, self._reporter = model, data, folder, reporter
        self._every = checkpoint_every
        self._saved = 0  # the step of the last checkpoint

    def run(self, params: Arrays, state: Arrays, start: int, stop: int) -> Arrays:
        """Return the parameters after the steps ``start`` to ``stop``; the last checkpoint is theirs.

        Raises
        ------
        DivergedError
            If a loss or a parameter is not finite. The last checkpoint is of a step before.
        """
        self._saved = start
        pending: list[Array] = []
        fetched = time.perf_counter()
        for done in range(start + 1, stop + 1):
            x, y = self._data.batch(done - 1)
            params, state, loss = self._model.step(params, state, self._model.native(x), self._model.native(y))
            pending.append(loss)
            due = done % self._every == 0 or done == stop
            if due or len(pending) == MOST_STEPS or time.perf_counter() - fetched > MOST_SECONDS:
                self._record(pending, done)
                pending, fetched = [], time.perf_counter()
            if due:
                self._save(done, params, state)
        return params

    def kept(self) -> str:
        """Say what is kept of a run that stops now, and how to go on."""
        path = shlex.quote(str(self._folder.path))
        return f"the checkpoint of step {self._saved} is kept, continue with: polyattn train --resume --output {path}"

    def _record(self, pending: list[Array], done: int) -> None:
        """Log the losses of the steps up to ``done``, and stop at one that is not finite."""
        losses = self._model.fetch(pending)
        bad = np.flatnonzero(~np.isfinite(losses))
        good = int(bad[0]) if bad.size else len(losses)
        first = done - len(losses) + 1
        self._folder.log([
            {"step": first + i, "loss": float(losses[i]), "learning_rate": self._model.schedule(first + i - 1)}
            for i in range(good)
        ])  # fmt: skip
        if bad.size:
            step = first + good
            # The first loss is that of the initial parameters: the learning rate has no part in it.
            remedy = self._remedy("smaller numbers in --data, or a wider --dtype") if step == 1 else self._remedy()
            raise DivergedError(f"training diverged: the loss of step {step} is {losses[good]}; {remedy}")
        self._reporter.update(done, float(losses[-1]))

    def _save(self, done: int, params: Arrays, state: Arrays) -> None:
        if not self._model.finite({**params, **state}):
            raise DivergedError(f"training diverged: step {done} left parameters that are not finite; {self._remedy()}")
        try:
            self._folder.save(done, self._model.config.to_dict(), self._model.backend.name, params, state)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self.kept()}") from error
        self._saved = done

    def _remedy(self, remedy: str = "a lower --learning-rate") -> str:
        return f"the checkpoint of step {self._saved} is kept in {self._folder.path}; try {remedy}"
