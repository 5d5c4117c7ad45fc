"""The output folder of a run: its checkpoint and its metrics."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array
from ..checkpoint import LEFTOVERS, read_tensors, write_bytes, write_tensors
from ..errors import CheckpointError
from ._config import OptionError, resolve
from ._lock import locked

__all__ = ["Elsewhere", "Folder", "Saved", "new_folder"]

KIND = {"format": "polyattn-train", "version": "1"}
OPTIMISER = "optim."
KEPT = "the last checkpoint is kept: once the cause is removed, continue with --resume"


class Saved(NamedTuple):
    """The content of a checkpoint."""

    step: int
    config: dict[str, Any]
    backend: str
    params: dict[str, np.ndarray[Any, Any]]
    state: dict[str, np.ndarray[Any, Any]]


class Folder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint.safetensors"
        self.metrics = path / "metrics.jsonl"

    def locked(self) -> AbstractContextManager[str]:
        """Create the folder if it is missing, and keep all other runs out of it; see :func:`_lock.locked`."""
        with _named(self.path, "the folder cannot be made", "choose another --output"):
            self.path.mkdir(parents=True, exist_ok=True)
        return locked(self.path)

    def begin(self, overwrite: bool) -> None:
        """Raise OptionError if the folder has a run and ``overwrite`` is false."""
        with _named(self.path, "cannot be read", "choose another --output"):
            taken = self.checkpoint.exists() or self.metrics.exists()
        if taken and not overwrite:
            raise OptionError(
                f"--output: {self.path} already holds a run; continue it with --resume, replace it with --overwrite, "
                "or choose another --output"
            )

    def expect_step(self, step: int) -> None:
        """Raise CheckpointError if another process wrote the checkpoint of another step before the lock was held."""
        if (now := self.load().step) != step:
            raise CheckpointError(
                f"{self.checkpoint}: another process went on from step {step} to step {now}; run the command again"
            )

    def save(
        self, step: int, config: dict[str, Any], backend: str, params: Mapping[str, Array], state: Mapping[str, Array]
    ) -> None:
        """Write the checkpoint of a step atomically."""
        tensors = {**params, **{OPTIMISER + name: value for name, value in state.items()}}
        about = {**KIND, "step": str(step), "backend": backend, "config": json.dumps(config)}
        write_tensors(self.checkpoint, tensors, about)

    def load(self) -> Saved:
        """Read the checkpoint; raise CheckpointError if there is none, or if it is damaged or another kind of file."""
        with _named(self.checkpoint, "cannot be read", "check --output"):
            there = self.checkpoint.exists()
        if not there:
            raise CheckpointError(
                f"{self.checkpoint}: there is no checkpoint to resume from; check --output, or start without --resume"
            )
        tensors, metadata = read_tensors(self.checkpoint)
        if not KIND.items() <= metadata.items():
            raise CheckpointError(
                f"{self.checkpoint}: not a checkpoint of polyattn train version {KIND['version']}; "
                "choose the --output of such a run, or start a new one without --resume"
            )
        try:
            step, config = int(metadata["step"]), resolve({}, json.loads(metadata["config"])).to_dict()
            if step < 0:
                raise ValueError(f"step {step}")
        except (KeyError, ValueError, TypeError, AttributeError) as cause:
            raise CheckpointError(f"{self.checkpoint}: its metadata are damaged: {cause!r}; start a new run") from cause
        state = {name: tensors.pop(name) for name in list(tensors) if name.startswith(OPTIMISER)}
        state = {name.removeprefix(OPTIMISER): value for name, value in state.items()}
        return Saved(step, config, metadata.get("backend", ""), tensors, state)

    def clean(self, until: int) -> None:
        """Delete the metrics of steps after ``until``, temporary files of a killed run, and old pictures at step 0."""
        kept = [line for line in self._lines() if line["step"] <= until]
        write_bytes(self.metrics, "".join(json.dumps(line) + "\n" for line in kept).encode())
        old = [self.path / name for name in ("loss.png", "attention.png")] if until == 0 else []
        for path in [*self.path.glob(LEFTOVERS), *old]:
            with _named(path, "cannot be deleted", KEPT):
                path.unlink(missing_ok=True)

    def log(self, lines: Sequence[Mapping[str, float]]) -> None:
        """Append one line for each step, and wait until they are on the disk."""
        with _named(self.metrics, "cannot be written", KEPT), open(self.metrics, "ab") as file:
            file.write("".join(json.dumps(dict(line)) + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def losses(self) -> tuple[list[int], list[float]]:
        """Return the steps and their losses, those before a resumption included."""
        lines = self._lines()
        return [line["step"] for line in lines], [line["loss"] for line in lines]

    def _lines(self) -> list[dict[str, Any]]:
        with _named(self.metrics, "cannot be read", KEPT):
            texts = self.metrics.read_bytes().splitlines() if self.metrics.exists() else []
        return [line for text in texts if (line := _parsed(text)) is not None]


class Elsewhere(Folder):
    """The folder of a run for a process that does not write: another one does."""

    def locked(self) -> AbstractContextManager[str]:
        """Create and lock nothing."""
        return nullcontext("")

    def begin(self, overwrite: bool) -> None:
        """Look at nothing."""

    def expect_step(self, step: int) -> None:
        """Look at nothing."""

    def save(
        self, step: int, config: dict[str, Any], backend: str, params: Mapping[str, Array], state: Mapping[str, Array]
    ) -> None:
        """Write nothing."""

    def clean(self, until: int) -> None:
        """Delete nothing."""

    def log(self, lines: Sequence[Mapping[str, float]]) -> None:
        """Write nothing."""


def new_folder(backend: str) -> Path:
    """Create a new folder ``runs/BACKEND-TIME``, and return it."""
    name = f"{backend}-{time.strftime('%Y%m%d-%H%M%S')}"
    for attempt in range(1, 100):
        path = Path("runs", name if attempt == 1 else f"{name}-{attempt}")
        with _named(path, "the folder cannot be made", "choose another --output"):
            try:
                path.mkdir(parents=True)
            except FileExistsError:  # of a run that began in the same second
                continue
            return path
    raise OptionError(f"--output: {path} and all lower numbers exist; name a folder")


@contextmanager
def _named(path: Path, failed: str, remedy: str) -> Iterator[None]:
    """Raise CheckpointError with the file, what failed, the system's reason and the remedy for an OSError."""
    try:
        yield
    except OSError as cause:
        raise CheckpointError(f"{path}: {failed}: {cause.strerror or cause}; {remedy}") from cause


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return a line of the metrics, or None if a kill truncated it."""
    try:
        line = json.loads(text)
        return line if isinstance(line["step"], int) and isinstance(line["loss"], float) else None
    except (ValueError, KeyError, TypeError):
        return None
