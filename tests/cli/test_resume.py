"""A run that was stopped, killed or continued equals the uninterrupted run; a failed run loses nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.checkpoint import read_tensors, write_tensors
from polyattn.training._samples import PointerCopy

SMALL = ("--batch", 8, "--sequence", 4, "--width", 4, "--json")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def tensors_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    return read_tensors(folder / "checkpoint.safetensors")[0]


def step_of(folder: Path) -> int:
    return int(read_tensors(folder / "checkpoint.safetensors")[1]["step"])


def expect_same_run(a: Path, b: Path) -> None:
    """Compare losses and parameters bit for bit."""
    assert lines(a) == lines(b)
    first, second = tensors_of(a), tensors_of(b)
    assert first.keys() == second.keys()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the pictures, which test_train.py checks: they take longer than these runs."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def run_folder(command: Any, tmp_path: Path) -> Path:
    """A run of 10 steps in the folder ``run``."""
    assert command("train", "--steps", 10, "--output", "run", *SMALL).code == 0
    return tmp_path / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_that_goes_on_in_a_new_process_is_the_uninterrupted_run(
    command: Any, process: Any, backend: str, tmp_path: Path
) -> None:
    command("train", "--backend", backend, "--steps", 30, "--output", "whole", *SMALL)
    command("train", "--backend", backend, "--steps", 13, "--output", "parts", *SMALL)
    result = process("train", "--resume", "--steps", 30, "--output", "parts", "--json").result
    assert (result["backend"], result["resumed_from"], result["steps"]) == (backend, 13, 30)
    expect_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_killed_run_resumes_bit_for_bit(command: Any, process: Any, tmp_path: Path) -> None:
    arguments = ["--steps", "1000000", "--checkpoint-every", "20", "--output", "killed", "--json"]
    victim = subprocess.Popen(
        [sys.executable, "-m", "polyattn", "train", *arguments], cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    checkpoint = tmp_path / "killed" / "checkpoint.safetensors"
    while time.monotonic() < deadline and not (checkpoint.exists() and step_of(tmp_path / "killed") >= 40):
        time.sleep(0.005)
    victim.send_signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    step = step_of(tmp_path / "killed")
    assert step >= 40
    stop = step + 30
    assert process("train", "--resume", "--steps", stop, "--output", "killed", "--json").result["resumed_from"] == step
    assert command("train", "--steps", stop, "--output", "whole", "--json").code == 0
    expect_same_run(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed").glob(".*"))


def test_metrics_after_the_checkpoint_are_dropped_not_doubled(command: Any, run_folder: Path) -> None:
    whole = (run_folder / "metrics.jsonl").read_bytes()
    with open(run_folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 11, "loss": 0.5, "learning_rate": 0.1}\n{"step": 12, "lo')
    (run_folder / ".polyattn-00000000.tmp").write_bytes(b"half a checkpoint")
    assert command("train", "--resume", "--output", "run", "--json").result["resumed_from"] == 10
    assert (run_folder / "metrics.jsonl").read_bytes() == whole
    assert not (run_folder / ".polyattn-00000000.tmp").exists()


def test_a_run_moves_to_another_backend(command: Any, run_folder: Path) -> None:
    pytest.importorskip("array_api_strict", reason="array-api-strict is not installed: no second backend")
    result = command(
        "train", "--resume", "--steps", 20, "--backend", "array-api-strict", "--output", "run", "--json"
    ).result
    assert (result["backend"], result["steps"], result["resumed_from"]) == ("array-api-strict", 20, 10)
    assert [line["step"] for line in lines(run_folder)] == list(range(1, 21))


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--heads", 4, "--heads 4 (the run has 2)"),
        ("--width", 6, "--width 6 (the run has 4)"),
        ("--dtype", "float64", "--dtype float64 (the run has float32)"),
        ("--batch", 9, "--batch 9 (the run has 8)"),
        ("--seed", 3, "--seed 3 (the run has 0)"),
        ("--learning-rate", 0.1, "--learning-rate 0.1 (the run has 0.05)"),
        ("--steps", 9, "is at step 10 already"),
    ],
)
def test_another_architecture_is_refused_and_says_what_differs(
    command: Any, run_folder: Path, option: str, value: object, told: str
) -> None:
    before = content(run_folder)
    assert told in command("train", "--resume", "--output", "run", option, value).refused(2)
    assert content(run_folder) == before


def test_a_run_that_is_done_says_so(command: Any, run_folder: Path) -> None:
    before = content(run_folder)
    outcome = command("train", "--resume", "--output", "run", "--json")
    assert outcome.result["resumed_from"] == outcome.result["steps"] == 10
    assert "the run is at step 10 already, nothing to train; give more --steps to go on" in outcome.err
    assert content(run_folder) == before


def test_parameters_that_are_not_the_settings_are_named(command: Any, run_folder: Path) -> None:
    tensors, metadata = read_tensors(run_folder / "checkpoint.safetensors")
    damaged = {**tensors, "q_proj.bias": np.zeros(5, dtype=np.float32)}
    write_tensors(run_folder / "checkpoint.safetensors", damaged, metadata)
    assert "differ in q_proj.bias" in command("train", "--resume", "--output", "run").refused(1)
    del damaged["optim.mean.q_proj.bias"], damaged["q_proj.bias"]
    write_tensors(run_folder / "checkpoint.safetensors", damaged, metadata)
    assert "differ in q_proj.bias" in command("train", "--resume", "--output", "run").refused(1)


@pytest.mark.parametrize("keep", [0, 100, -5])
def test_a_damaged_checkpoint_is_refused_and_kept(command: Any, run_folder: Path, keep: int) -> None:
    checkpoint = run_folder / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:keep])
    before = content(run_folder)
    assert "checkpoint.safetensors: not a safetensors file" in command("train", "--resume", "--output", "run").refused(
        1
    )
    assert content(run_folder) == before


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": "2"},
        {"step": "-1"},
        {"step": "x"},
        {"config": "[]"},
        {"config": '{"heads": "2"}'},
    ],
)
def test_a_foreign_checkpoint_is_refused_and_kept(command: Any, run_folder: Path, change: dict[str, str]) -> None:
    tensors, metadata = read_tensors(run_folder / "checkpoint.safetensors")
    write_tensors(run_folder / "checkpoint.safetensors", tensors, {**metadata, **change})
    before = content(run_folder)
    assert "checkpoint.safetensors" in command("train", "--resume", "--output", "run").refused(1)
    assert content(run_folder) == before


def test_the_file_of_a_layer_is_no_run(command: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    pa.MultiHeadAttention(4, 2).save(tmp_path / "run" / "checkpoint.safetensors")
    assert "not a checkpoint of polyattn train" in command("train", "--resume", "--output", "run").refused(1)


def test_a_run_is_not_overwritten_by_accident(command: Any, run_folder: Path) -> None:
    before = content(run_folder)
    told = command("train", "--output", "run", *SMALL).refused(2)
    assert "--resume" in told
    assert "--overwrite" in told
    assert content(run_folder) == before
    assert command("train", "--overwrite", "--steps", 3, "--output", "run", *SMALL).code == 0
    assert [line["step"] for line in lines(run_folder)] == [1, 2, 3]
    assert step_of(run_folder) == 3


def test_there_must_be_something_to_resume(command: Any, tmp_path: Path) -> None:
    assert "there is no checkpoint to resume from" in command("train", "--resume", "--output", "none").refused(1)
    assert "--output" in command("train", "--resume").refused(2)
    assert "exclude each other" in command("train", "--resume", "--overwrite", "--output", "none").refused(2)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Call a function once, when the samples of a step are generated."""

    def arrange(step: int, event: Callable[[], None]) -> None:
        original = PointerCopy.batch

        def batch(self: PointerCopy, index: int) -> Any:
            if index == step - 1:
                monkeypatch.setattr(PointerCopy, "batch", original)
                event()
            return original(self, index)

        monkeypatch.setattr(PointerCopy, "batch", batch)

    return arrange


def test_an_interrupt_says_how_to_go_on(command: Any, at_step: Any, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    at_step(8, interrupt)
    code, out, err = command("train", "--steps", 12, "--checkpoint-every", 5, "--output", "run", *SMALL)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == (
        "polyattn: interrupted; the checkpoint of step 5 is kept, continue with: polyattn train --resume --output run"
    )
    assert command("train", "--resume", "--output", "run", "--json").result["resumed_from"] == 5
    assert command("train", "--steps", 12, "--output", "whole", *SMALL).code == 0
    expect_same_run(tmp_path / "whole", tmp_path / "run")


def test_an_interrupt_after_the_last_step_keeps_it(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PointerCopy, "evaluation", interrupt)
    code, out, err = command("train", "--steps", 4, "--output", "my run", *SMALL)
    assert (code, out) == (130, "")
    assert err.splitlines()[-1].endswith(
        "the checkpoint of step 4 is kept, continue with: polyattn train --resume --output 'my run'"
    )
    assert step_of(tmp_path / "my run") == 4


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    command: Any, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PointerCopy.batch
    monkeypatch.setattr(
        PointerCopy, "batch", lambda self, step: tuple(x * (np.nan if step == 7 else 1.0) for x in original(self, step))
    )
    outcome = command("train", "--backend", backend, "--steps", 12, "--checkpoint-every", 5, "--output", "run", *SMALL)
    told = outcome.refused(1)
    assert "the loss of step 8 is nan" in told
    assert "the checkpoint of step 5 is kept" in told
    assert step_of(tmp_path / "run") == 5
    assert all(np.isfinite(x).all() for x in tensors_of(tmp_path / "run").values())
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(1, 8))


def test_parameters_that_are_not_finite_are_never_saved(command: Any, tmp_path: Path) -> None:
    outcome = command("train", "--learning-rate", 1e38, "--checkpoint-every", 1, "--output", "run", *SMALL)
    assert "training diverged" in outcome.refused(1)
    assert all(np.isfinite(x).all() for x in tensors_of(tmp_path / "run").values())


def test_a_full_disk_keeps_the_last_good_checkpoint(
    command: Any, at_step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fsync = os.fsync
    at_step(8, lambda: monkeypatch.setattr(os, "fsync", full))
    outcome = command("train", "--steps", 12, "--checkpoint-every", 5, "--output", "run", *SMALL)
    told = outcome.refused(1)
    assert "No space left on device" in told
    assert "--resume" in told
    monkeypatch.setattr(os, "fsync", fsync)
    assert step_of(tmp_path / "run") == 5
    assert not list((tmp_path / "run").glob(".*"))
    assert command("train", "--resume", "--output", "run", "--json").result["resumed_from"] == 5
    assert command("train", "--steps", 12, "--output", "whole", *SMALL).code == 0
    expect_same_run(tmp_path / "whole", tmp_path / "run")


def test_metrics_that_cannot_be_read_are_told(command: Any, run_folder: Path) -> None:
    (run_folder / "metrics.jsonl").unlink()
    (run_folder / "metrics.jsonl").mkdir()
    told = command("train", "--resume", "--steps", 12, "--output", "run").refused(1)
    assert "run/metrics.jsonl: cannot be read: Is a directory; the last checkpoint is kept" in told


def test_a_folder_that_cannot_be_written_is_told_before_training(command: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    told = command("train", "--output", tmp_path / "file" / "run", *SMALL).refused(1)
    assert "Not a directory" in told
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
