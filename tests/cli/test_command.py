"""The command line itself: help, backends, check, and the output of errors."""

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

import polyattn as pa
from polyattn.testing import check as check_module

FRAMEWORKS = {"torch", "jax", "cupy", "array_api_strict", "matplotlib"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_names_every_command_and_imports_no_framework() -> None:
    done = python(
        "import sys\nfrom polyattn.__main__ import main\nsys.argv = ['polyattn', '--help']\n"
        f"try: main()\nfinally: print(sorted({FRAMEWORKS!r} & set(sys.modules)))"
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"
    for name in ("train", "backends", "check", "new-backend"):
        assert name in done.stdout


def test_python_m_polyattn_tells_its_version(process: Any) -> None:
    assert process("--version") == (0, f"polyattn {pa.__version__}\n", "")


def test_the_polyattn_command_is_installed() -> None:
    (entry,) = metadata.entry_points(group="console_scripts", name="polyattn")
    assert entry.value == "polyattn.__main__:main"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_prints_the_install_line(missing: str) -> None:
    done = python(f"import sys\nsys.modules[{missing!r}] = None\nfrom polyattn.__main__ import main\nmain()")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f'polyattn: error: the command line needs {missing}; install it with: pip install "polyattn[cli]"\n'
    )


def test_another_missing_module_is_not_mistaken_for_the_extra() -> None:
    done = python("import sys\nsys.modules['polyattn.cli'] = None\nfrom polyattn.__main__ import main\nmain()")
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nonsense",), "No such command 'nonsense'. See polyattn --help."),
        (("trian",), "Did you mean 'train'? See polyattn --help."),
        (("train", "--stps", "3"), "No such option: --stps"),
        (("train", "--steps", "many"), "Invalid value for '--steps'"),
        (("train", "--backend", "torhc"), "no backend is called 'torhc'"),
        (("check", "nupmy"), "Did you mean 'numpy'?"),
        (("check",), "Missing argument"),
        (("check", "numpy", "torch"), "unexpected argument 'torch': one backend at a time"),
        (("check", "no_such_module", "--namespace"), "no_such_module"),
        (("check", "json", "--namespace"), "expected the module of an array API namespace, got 'json'"),
    ],
)
def test_a_bad_command_line_is_told_in_one_line(command: Any, arguments: tuple[str, ...], told: str) -> None:
    outcome = command(*arguments)
    assert told in outcome.refused(2)
    assert len(outcome.err.splitlines()) == 1
    assert outcome.out == ""


def test_no_command_prints_the_help(command: Any) -> None:
    code, out, err = command()
    assert (code, err) == (2, "")
    assert "Usage: polyattn" in out


def test_backends_lists_each_with_its_state(command: Any) -> None:
    infos = {info.name: info for info in pa.list_backends()}
    code, out, _ = command("backends")
    assert code == 0
    table = {
        cells[0]: cells for line in out.splitlines() if (cells := [cell.strip() for cell in line.split("│")[1:-1]])
    }
    assert table.keys() == infos.keys()
    for name, info in infos.items():
        assert table[name] == [name, info.version, info.state, ", ".join(info.devices), info.distribution]
        if info.state != "ready":
            (line,) = [line for line in out.splitlines() if line.startswith(f"{name}: ")]
            assert info.reason in line
            assert info.install in line
        assert all(f"{name}: {note}" in out.splitlines() for note in info.notes)


def test_backends_as_json(command: Any) -> None:
    found = json.loads(command("backends", "--json").out)
    assert [entry["name"] for entry in found] == [info.name for info in pa.list_backends()]
    assert {"name", "distribution", "version", "state", "reason", "devices", "install", "notes"} == found[0].keys()


def test_check_runs_the_kit_on_a_backend(command: Any, backend: str) -> None:
    report = command("check", backend, "--json", "--", "-k", "softmax").result
    assert report["backend"] == backend
    assert report["passed"] > 0
    assert report["failed"] == 0


def test_an_interrupt_is_no_traceback(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check_module, "run_check", interrupt)
    assert command("check", "numpy") == (130, "", "polyattn: interrupted\n")
