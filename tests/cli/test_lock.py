"""One run at a time uses a folder: a second one is refused, and a killed one leaves no lock."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import polyattn as pa
from polyattn.training import OptionError, train
from polyattn.training._lock import LOCK, locked
from polyattn.training._samples import PointerCopy

SMALL = ("--batch", 8, "--sequence", 4, "--width", 4, "--json")
HOLDER = """
import sys, time
from pathlib import Path
from polyattn.training._lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


@pytest.fixture(autouse=True)
def _without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def holder(tmp_path: Path) -> Any:
    """A process that holds the lock of the folder ``run``."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLDER, tmp_path / "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("how", [{}, {"overwrite": True}, {"resume": True}], ids=["new", "overwrite", "resume"])
def test_a_second_run_is_refused_and_the_first_is_not_disturbed(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, bool]
) -> None:
    original, refused = PointerCopy.batch, []

    def batch(self: PointerCopy, index: int) -> Any:
        if index == 7:
            before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
            with pytest.raises(OptionError) as raised:
                train({}, output="run", **how)  # type: ignore[arg-type]  # they are booleans
            refused.append(str(raised.value))
            assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before
        return original(self, index)

    assert command("train", "--steps", 12, "--output", "whole", *SMALL).code == 0
    monkeypatch.setattr(PointerCopy, "batch", batch)
    assert command("train", "--steps", 12, "--checkpoint-every", 5, "--output", "run", *SMALL).code == 0
    (told,) = refused
    assert f"--output: run is in use by process {os.getpid()} on " in told
    assert "wait until it ends, or choose another --output" in told
    for name in ("checkpoint.safetensors", "metrics.jsonl"):
        assert (tmp_path / "run" / name).stat().st_size == (tmp_path / "whole" / name).stat().st_size
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_killed_run_leaves_no_lock(command: Any, holder: Any, tmp_path: Path) -> None:
    told = command("train", "--steps", 3, "--output", "run", *SMALL).refused(2)
    assert f"run is in use by process {holder.pid} on " in told
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert command("train", "--steps", 3, "--output", "run", *SMALL).result["steps"] == 3
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_checkpoint_that_moved_on_before_the_lock_is_not_overwritten(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading of the checkpoint and the lock, another process trains and ends."""
    assert command("train", "--steps", 3, "--output", "run", *SMALL).code == 0
    from polyattn.training import _trainer

    original = _trainer.Model

    def model(*arguments: Any) -> Any:
        monkeypatch.setattr(_trainer, "Model", original)
        train({"steps": 5}, output="run", resume=True)
        return original(*arguments)

    monkeypatch.setattr(_trainer, "Model", model)
    told = command("train", "--resume", "--steps", 9, "--output", "run").refused(1)
    assert "another process went on from step 3 to step 5; run the command again" in told
    assert command("train", "--resume", "--steps", 9, "--output", "run", "--json").result["resumed_from"] == 5


def _fail_to_lock(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)


@pytest.mark.skipif(os.name != "posix", reason="flock is POSIX's")
def test_a_file_system_without_locks_is_told(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_to_lock(monkeypatch, errno.ENOLCK)
    outcome = command("train", "--steps", 3, "--output", "run", *SMALL)
    assert outcome.result["steps"] == 3
    assert "run is on a file system without locks: let no other process train in this folder" in outcome.err


@pytest.mark.skipif(os.name != "posix", reason="flock is POSIX's")
def test_a_lock_that_fails_is_told(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_to_lock(monkeypatch, errno.EIO)
    told = command("train", "--steps", 3, "--output", "run", *SMALL).refused(1)
    assert f"run/{LOCK}: cannot be locked: Input/output error" in told


def test_the_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    """The file is deleted by who held it, while others wait for it or have just opened it."""
    inside: list[int] = []
    most: list[int] = []
    refusals: set[str] = set()

    def contend(number: int) -> None:
        entered, deadline = 0, time.monotonic() + 60
        while entered < 20 and time.monotonic() < deadline:
            try:
                with locked(tmp_path):
                    inside.append(number)
                    time.sleep(1e-5)
                    most.append(len(inside))
                    inside.remove(number)
                    entered += 1
            except pa.ArgumentError as error:
                refusals.add(str(error))

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 160
    assert refusals
    assert all("is in use by" in told for told in refusals)
    assert list(tmp_path.iterdir()) == []
