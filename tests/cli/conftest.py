"""How the tests run the command line: in this process, and in one of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from polyattn.cli import run


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """The JSON object in the last line of standard output."""
        assert self.code == 0, self.err
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    def refused(self, code: int) -> str:
        """The error message, which is one line."""
        assert self.code == code, self.err
        assert "Traceback" not in self.err
        line = self.err.splitlines()[-1]
        assert line.startswith("polyattn: error: ")
        assert self.err.count("polyattn: error") == 1
        return line


Command = Callable[..., Outcome]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``polyattn ARGUMENTS`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call


def run_process(folder: Path, *arguments: object, variables: dict[str, str] | None = None) -> Outcome:
    """Run ``python -m polyattn ARGUMENTS`` in a process of its own; ``variables`` are added to its environment."""
    # Several threads on arrays this small only wait for each other, for long where other processes run beside them.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    command = [sys.executable, "-m", "polyattn", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def process(tmp_path: Path) -> Command:
    """Run ``polyattn`` in a process of its own, in an empty folder."""
    return partial(run_process, tmp_path)


@pytest.fixture(scope="session")
def float64_curve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Return the losses of the first 100 steps on a backend in float64."""

    @cache
    def curve(backend: str) -> list[float]:
        folder = tmp_path_factory.mktemp("curve")
        arguments = ("--backend", backend, "--output", "run", "--dtype", "float64", "--steps", 100, "--json")
        assert run_process(folder, "train", *arguments, variables={"JAX_ENABLE_X64": "1"}).result["backend"] == backend
        lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]

    return curve
