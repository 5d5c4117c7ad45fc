"""A training run from its options to its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

from ..errors import PolyattnError
from ..selection import Selection, get_backend, selected, use_backend
from ._config import Config, OptionError, resolve
from ._folder import Folder, Saved, new_folder
from ._loop import Loop
from ._measure import measure
from ._model import Model
from ._npz import Epochs, Samples, load_npz
from ._pictures import draw_pictures, target_positions
from ._progress import Reporter
from ._step import Arrays
from ._task import Data, PointerCopy

__all__ = ["train"]

SMALL = 2_000_000  # multiplications in one projection of a step: well under a millisecond


def train(
    given: Mapping[str, Any],
    *,
    backend: str | None = None,
    device: str | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    checkpoint_every: int = 200,
) -> dict[str, Any]:
    """Train multi-head attention on the pointer-copy task or on the user's samples.

    Parameters
    ----------
    given : mapping
        The settings of :class:`Config` that the user named.
    backend, device : str, optional
        Where to compute; by default the selection in force, then that of the resumed run, then NumPy.
    output : path, optional
        The folder of the run; by default a new one below ``runs``.
    resume, overwrite : bool
        Continue the run in ``output``, or replace it.
    checkpoint_every : int
        The number of steps between two checkpoints.

    Returns
    -------
    dict
        Where and how long it ran, and how good the result is, as plain data.

    Raises
    ------
    OptionError, UnknownBackendError
        If the options do not go together, or name what there is not; nothing has been written.
    PolyattnError
        If the data do not fit, the checkpoint cannot be read or written, memory runs out, or training diverges.
    KeyboardInterrupt
        With a message that says how to go on.
    """
    _check_options(given, output, resume, overwrite, checkpoint_every)
    output = None if output is None else Path(output)
    saved = Folder(output).load() if resume and output is not None else None
    where = _select(backend, device, saved)
    config, data = _settings(given, saved, output)
    with use_backend(where.backend, where.device), _memory_told():
        model = Model(config, where.backend, where.device)
        params, state = model.start() if saved is None else model.restore(saved)
        folder = Folder(output or new_folder(where.backend))
        if saved is None:
            folder.begin(overwrite)
            folder.save(0, config.to_dict(), where.backend, params, state)
        start = saved.step if saved else 0
        folder.clean(start)
        with _few_threads(config), Reporter(start, config.steps) as reporter:
            if saved and start == config.steps:
                reporter.say(f"the run is at step {start} already, nothing to train; give more --steps to go on")
            loop = Loop(model, data, folder, reporter, checkpoint_every)
            began = time.perf_counter()
            try:
                params = loop.run(params, state, start, config.steps)
                seconds = time.perf_counter() - began
                measured = measure(lambda x: model.predict(params, x), data.evaluation())
                _draw(model, params, data, folder, measured["baseline_loss"], reporter.say)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"interrupted; {loop.kept()}") from None
    return _result(model, folder, data, start, seconds, measured)


def _few_threads(config: Config) -> AbstractContextManager[Any]:
    """Hold the BLAS and OpenMP to one thread where a step's products are small.

    Threads gain nothing there, and on a machine that is busy otherwise they wait for each other: torch was seen
    to make 15 steps a second in place of 200.
    """
    products = config.batch * config.sequence * config.width**2
    return threadpool_limits(1) if products < SMALL else nullcontext()


@contextmanager
def _memory_told() -> Iterator[None]:
    """Turn what the libraries raise when memory runs out into one error: only MemoryError is common to two of them."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        cause = str(error).partition("\n")[0]
        words = ("out of memory", "can't allocate memory", "RESOURCE_EXHAUSTED")
        if not isinstance(error, MemoryError) and not any(word in cause for word in words):
            raise
        raise PolyattnError(f"out of memory ({cause}); choose a smaller --batch, --sequence or --width") from error


def _check_options(
    given: Mapping[str, Any], output: str | Path | None, resume: bool, overwrite: bool, checkpoint_every: int
) -> None:
    for option, path in (("--output", output), ("--data", given.get("data"))):
        if path == "":  # an unset variable of a shell script, say; not the current folder
            raise OptionError(f"{option}: expected a path, got an empty one")
    if resume and overwrite:
        raise OptionError("--resume and --overwrite exclude each other: name one")
    if resume and output is None:
        raise OptionError("--resume: name the folder of the run with --output")
    if checkpoint_every < 1:
        raise OptionError(f"--checkpoint-every: expected at least 1, got {checkpoint_every}")


def _select(backend: str | None, device: str | None, saved: Saved | None) -> Selection:
    """Return where to compute: the options, the selection in force, the resumed run's backend, NumPy."""
    if backend is None and device is not None:
        raise OptionError(f"--device: {device!r} was given without a backend; name it with --backend")
    choice = selected(backend, device) if backend is not None else get_backend()
    if choice is None:
        choice = selected(saved.backend if saved and saved.backend else "numpy")
    assert choice is not None
    return choice


def _settings(given: Mapping[str, Any], saved: Saved | None, output: Path | None) -> tuple[Config, Data]:
    """Return the settings of the run and where its samples come from."""
    stored = saved.config if saved else None
    path: str = given.get("data") or (stored or {}).get("data") or ""
    samples = load_npz(path) if path else None
    if samples is not None:
        given = {**given, **_of_file(given, samples, path)}
    config = resolve(given, stored, str(output))
    if saved and config.steps < saved.step:
        raise OptionError(f"--steps: the run in {output} is at step {saved.step} already; give at least as many")
    if samples is None:
        return config, PointerCopy(config.sequence, config.width, config.batch, config.seed)
    samples.check_range(config.dtype)
    return config, Epochs(samples.x, samples.y, config.batch, config.seed)


def _of_file(given: Mapping[str, Any], samples: Samples, path: str) -> dict[str, Any]:
    """Return the settings that a data file decides."""
    _, sequence, width = samples.x.shape
    for name, value in (("width", width), ("sequence", sequence)):
        if given.get(name, value) != value:
            raise OptionError(f"--{name}: {path} has a {name} of {value}, got {given[name]}; leave the option out")
    fixed = {"data": str(Path(path).resolve()), "data_digest": samples.digest, "width": width, "sequence": sequence}
    # An odd number of features goes to one head.
    return fixed if "heads" in given or width % Config.heads == 0 else {**fixed, "heads": 1}


def _draw(
    model: Model, params: Arrays, data: Data, folder: Folder, baseline: float | None, say: Callable[[str], None]
) -> None:
    x, y = (array[:1] for array in data.evaluation())
    config = model.config
    what = "Pointer copy" if config.data is None else Path(config.data).name
    draw_pictures(
        folder.path,
        folder.losses(),
        baseline or 0.0,
        model.attention_weights(params, x)[0],
        target_positions(x[0], y[0]),
        f"{what}, {model.backend.name}, {config.dtype}, step {config.steps}",
        say,
    )


def _result(
    model: Model, folder: Folder, data: Data, start: int, seconds: float, measured: Mapping[str, float | None]
) -> dict[str, Any]:
    steps = model.config.steps
    return {
        "backend": model.backend.name,
        "device": model.device,
        "dtype": model.config.dtype,
        "steps": steps,
        "resumed_from": start,
        "seconds": round(seconds, 3),
        "steps_per_second": round((steps - start) / seconds, 1) if steps > start else 0.0,
        **measured,
        "evaluated_on": data.evaluated_on,
        "output": str(folder.path),
    }
