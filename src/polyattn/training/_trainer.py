"""A training run, from its options to its result."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ..backend import Array
from ..errors import CheckpointError, PolyattnError
from ..selection import Selection, get_backend, selected, use_backend
from ._config import Config, OptionError, resolve
from ._folder import Elsewhere, Folder, Saved, new_folder
from ._measure import measure, positions
from ._model import Arrays, Model
from ._pictures import draw_pictures
from ._progress import Reporter
from ._samples import Epochs, PointerCopy, digest, expect_range, load_npz
from ._workers import team_of

__all__ = ["DivergedError", "train"]

SMALL = 2_000_000  # multiplications in one projection of a step: well under a millisecond
# Losses are fetched together: to look at one is to wait for the device.
MOST_STEPS, MOST_SECONDS = 50, 0.25


class DivergedError(PolyattnError, ArithmeticError):
    """The loss or a parameter is no longer finite."""


def train(
    given: Mapping[str, Any],
    *,
    backend: str | None = None,
    device: str | None = None,
    output: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_every: int = 200,
    engine: str | None = None,
    workers: int | None = None,
) -> dict[str, Any] | None:
    """Train multi-head attention on the pointer-copy task or on the user's samples; return the result as plain data.

    The processes that torchrun starts share each batch; the first one writes the files and returns the result, the
    others return None. With the engine ``"dask"`` its workers compute the gradients, and this process does the rest.

    ``given`` has the settings of :class:`Config` that the user passed. By default a run computes on the selected
    backend, else on that of the resumed run, else on NumPy, and writes to a new folder below ``runs``.

    Raises
    ------
    OptionError, UnknownBackendError
        If options conflict, or name something that does not exist or a folder that another run uses. Nothing has been
        written.
    PolyattnError
        If the data do not fit, the checkpoint cannot be read or written, memory runs out, or training diverges.
    KeyboardInterrupt
        With a message that says how to continue.
    """
    _check_options(given, output, resume, overwrite, checkpoint_every)
    saved = Folder(Path(output)).load() if resume and output is not None else None
    where = _select(backend, device, saved)
    config, data = _settings(given, saved, output)
    with use_backend(where.backend, where.device), team_of(engine, workers) as team, _memory_errors():
        team.expect_samples(config.batch)
        model = Model(config, where.backend, where.device, team)
        params, state = model.start()
        if saved is not None:
            params = model.fitted("parameters", saved.params, params)
            state = model.fitted("optimiser state", saved.state, state)
        folder: Folder = Elsewhere(Path())
        if team.first:
            folder = Folder(new_folder(where.backend) if output is None else Path(output))
        # Threads do not speed up small products, and on a busy machine they wait for each other: torch did 15 steps
        # a second instead of 200.
        small = config.batch * config.sequence * config.width**2 < SMALL
        with folder.locked() as note, threadpool_limits(1) if small else nullcontext():
            if saved is None:
                folder.begin(overwrite)
                folder.save(0, config.to_dict(), where.backend, params, state)
            else:
                folder.expect_step(saved.step)
            start = saved.step if saved else 0
            team.expect_same_step(start)
            folder.clean(start)
            notes = [f"{where.backend} on {model.device}", team.what, *model.backend.notes(model.device), note]
            with Reporter(start, config.steps, shown=team.first) as reporter:
                reporter.say("; ".join(filter(None, notes)))
                run = _Run(model, data, folder, reporter, checkpoint_every, start)
                return run.result(params, state, team.first)


@dataclass
class _Run:
    """The steps of a run, with its logs and checkpoints, and its result."""

    model: Model
    data: PointerCopy | Epochs
    folder: Folder
    reporter: Reporter
    every: int
    saved: int
    """The step of the last checkpoint."""

    def result(self, params: Arrays, state: Arrays, first: bool) -> dict[str, Any] | None:
        """Train; on the first process evaluate, draw, and return the result."""
        model, config, start = self.model, self.model.config, self.saved
        if 0 < start == config.steps:
            self.reporter.say(f"the run is at step {start} already, nothing to train; give more --steps to go on")
        began = time.perf_counter()
        try:
            params = self._steps(params, state, start, config.steps)
            seconds = time.perf_counter() - began
            if not first:
                return None
            measured = measure(lambda x: model.predict(params, x), self.data.evaluation())
            self._draw(params, measured["baseline_loss"] or 0.0)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"interrupted; {self._kept()}") from None
        return {
            "backend": model.backend.name,
            "device": model.device,
            "dtype": config.dtype,
            "steps": config.steps,
            "resumed_from": start,
            "seconds": round(seconds, 3),
            "steps_per_second": round((config.steps - start) / seconds, 1) if config.steps > start else 0.0,
            **measured,
            "evaluated_on": self.data.evaluated_on,
            "output": str(self.folder.path),
        }

    def _steps(self, params: Arrays, state: Arrays, start: int, stop: int) -> Arrays:
        """Return the parameters after the steps; raise if a loss or a parameter is not finite."""
        pending: list[Array] = []
        fetched = time.perf_counter()
        for done in range(start + 1, stop + 1):
            x, y, part = self.model.share(self.data.batch(done - 1))
            params, state, loss = self.model.step(params, state, x, y, part)
            pending.append(loss)
            due = done % self.every == 0 or done == stop
            if due or len(pending) == MOST_STEPS or time.perf_counter() - fetched > MOST_SECONDS:
                self._record(pending, done)
                pending, fetched = [], time.perf_counter()
            if due:
                self._save(done, params, state)
        return params

    def _record(self, pending: list[Array], done: int) -> None:
        """Log the losses of the steps up to ``done``; raise at the first that is not finite."""
        losses = self.model.fetch(pending)
        first = done - len(losses) + 1
        bad = np.flatnonzero(~np.isfinite(losses))
        good = losses[: bad[0]] if bad.size else losses
        self.folder.log([
            {"step": step, "loss": float(loss), "learning_rate": self.model.schedule(step - 1)}
            for step, loss in enumerate(good, first)
        ])  # fmt: skip
        if bad.size:
            step = first + len(good)
            # The first loss is that of the initial parameters: it does not depend on the learning rate.
            remedy = "smaller numbers in --data, or a wider --dtype" if step == 1 else "a lower --learning-rate"
            raise self._diverged(f"the loss of step {step} is {losses[len(good)]}", remedy)
        self.reporter.update(done, float(losses[-1]))

    def _save(self, done: int, params: Arrays, state: Arrays) -> None:
        if not self.model.finite({**params, **state}):
            raise self._diverged(f"step {done} left parameters that are not finite", "a lower --learning-rate")
        try:
            self.folder.save(done, self.model.config.to_dict(), self.model.backend.name, params, state)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; {self._kept()}") from error
        self.saved = done

    def _diverged(self, what: str, remedy: str) -> DivergedError:
        kept = f"the checkpoint of step {self.saved} is kept in {self.folder.path}"
        return DivergedError(f"training diverged: {what}; {kept}; try {remedy}")

    def _kept(self) -> str:
        path = shlex.quote(str(self.folder.path))
        return f"the checkpoint of step {self.saved} is kept, continue with: polyattn train --resume --output {path}"

    def _draw(self, params: Arrays, baseline: float) -> None:
        config, (x, y) = self.model.config, (array[:1] for array in self.data.evaluation())
        weights = self.model.attention_weights(params, x)[0]
        what = "Pointer copy" if config.data is None else Path(config.data).name
        title = f"{what}, {self.model.backend.name}, {config.dtype}, step {config.steps}"
        found = positions(x[0], y[0])
        draw_pictures(self.folder.path, self.folder.losses(), baseline, weights, found, title, self.reporter.say)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raise one error if memory runs out; each library raises another one."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        cause = str(error).partition("\n")[0]
        words = ("out of memory", "can't allocate memory", "RESOURCE_EXHAUSTED")
        if not isinstance(error, MemoryError) and not any(word in cause for word in words):
            raise
        raise PolyattnError(f"out of memory ({cause}); choose a smaller --batch, --sequence or --width") from error


def _check_options(
    given: Mapping[str, Any], output: str | None, resume: bool, overwrite: bool, checkpoint_every: int
) -> None:
    for option, path in (("--output", output), ("--data", given.get("data"))):
        if path == "":  # from an unset variable of a shell script, for instance; not the current folder
            raise OptionError(f"{option}: expected a path, got an empty one")
    if resume and overwrite:
        raise OptionError("--resume and --overwrite exclude each other: choose one")
    if resume and output is None:
        raise OptionError("--resume: name the folder of the run with --output")
    if checkpoint_every < 1:
        raise OptionError(f"--checkpoint-every: expected at least 1, got {checkpoint_every}")


def _select(backend: str | None, device: str | None, saved: Saved | None) -> Selection:
    """Return the place to compute: by the options, the selection, the resumed run's backend, or NumPy."""
    if backend is None and device is not None:
        raise OptionError(f"--device: {device!r} was given without a backend; name it with --backend")
    choice = selected(backend, device) if backend is not None else get_backend()
    if choice is None:
        choice = selected(saved.backend if saved and saved.backend else "numpy")
    assert choice is not None
    return choice


def _settings(given: Mapping[str, Any], saved: Saved | None, output: str | None) -> tuple[Config, PointerCopy | Epochs]:
    """Return the settings of the run and the source of its samples."""
    stored = saved.config if saved else None
    path: str = given.get("data") or (stored or {}).get("data") or ""
    pairs = load_npz(path) if path else None
    if pairs is not None:
        _, sequence, width = pairs[0].shape
        for name, value in (("width", width), ("sequence", sequence)):
            if given.get(name, value) != value:
                raise OptionError(f"--{name}: {path} has a {name} of {value}, got {given[name]}; leave the option out")
        odd = {} if width % Config.heads == 0 else {"heads": 1}  # an odd number of features goes to one head
        file = {"data": str(Path(path).resolve()), "data_digest": digest(pairs), "width": width, "sequence": sequence}
        given = {**odd, **given, **file}
    config = resolve(given, stored, str(output))
    if saved and config.steps < saved.step:
        raise OptionError(f"--steps: the run in {output} is at step {saved.step} already; give at least as many")
    if pairs is None:
        return config, PointerCopy(config.sequence, config.width, config.batch, config.seed)
    expect_range(pairs, config.dtype)
    return config, Epochs(*pairs, config.batch, config.seed)
