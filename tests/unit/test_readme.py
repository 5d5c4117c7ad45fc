"""The README is correct: its Python runs as printed, its commands are CI's, its files and backends exist."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def table_column(heading: str, column: int) -> list[str]:
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [row[column].strip() for row in rows[2:]]


def test_the_python_runs_as_printed_on_any_backend(tmp_path: Path, backend: str) -> None:
    (code,), (printed,) = blocks("python"), blocks("text")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    ways = [{}, {"POLYATTN_BACKEND": backend, "JAX_ENABLE_X64": "1"}]  # it computes in float64
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("POLYATTN_")}
    for way in ways:
        command, environment = [sys.executable, "-W", "error", "-c", code], {**inherited, **way}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == printed, way


def test_there_are_two_commands_of_one_line() -> None:
    commands = blocks("sh")
    assert [command.count("\n") for command in commands] == [1, 1]


def test_ci_runs_the_readme_s_test_command() -> None:
    _, test_command = blocks("sh")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.rstrip("\n").splitlines()[-1] == test_command.strip()
    assert "set -euo pipefail" in script.splitlines()


def test_the_commands_need_no_newer_pip_than_23() -> None:
    for command in blocks("sh"):
        assert "--group" not in command
        assert "-c constraints.txt" in command


def test_each_backend_has_its_row_and_its_extra() -> None:
    backends = [name.strip("`") for name in table_column("Backends", 0)]
    assert sorted(backends) == sorted(PROJECT["project"]["entry-points"]["polyattn.backends"])
    extras = PROJECT["project"]["optional-dependencies"]
    named = {extra for cell in table_column("Backends", 2) for extra in re.findall(r"`([^`]+)`", cell)}
    assert named <= set(extras)
    # The first command takes one word for both, so each backend's name is an extra; cupy's depends on the machine.
    assert set(backends) - {"cupy"} <= set(extras)


@pytest.mark.parametrize("cell", table_column("What's where", 0))
def test_what_is_where_is_there(cell: str) -> None:
    for name in re.findall(r"`([^`]+)`", cell):
        assert any((base / name).exists() for base in (ROOT, ROOT / "src" / "polyattn")), name


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README):
        assert (ROOT / target).exists(), target


def test_every_requirement_of_the_extras_is_pinned() -> None:
    def canonical(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonical(line.partition("==")[0]) for line in lines if line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    project, groups = PROJECT["project"], PROJECT["dependency-groups"]
    required = [*project["dependencies"]]
    required += [r for name, extra in project["optional-dependencies"].items() if "cuda" not in name for r in extra]
    required += [r for members in groups.values() for r in members if isinstance(r, str)]
    names = {canonical(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in required}
    assert names - {"polyattn"} <= pinned
