"""The build of the native library: by zig or by a compiler of the machine, and what it leaves if there is none."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from polyattn_native import _build, _library, _targets

ROOT = Path(__file__).resolve().parents[3]
PLATFORM = _targets.host()
pytestmark = pytest.mark.skipif(PLATFORM not in _targets.TARGETS, reason=f"there are no native kernels for {PLATFORM}")
SMALL = 'extern "C" __attribute__((visibility("default"))) int polyattn_small() { return 3; }\n'


@pytest.fixture
def compiler() -> _build.Compiler:
    """A compiler of this machine."""
    found = next(_build.compilers(), None)
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of small sources in place of the kernels, which take a minute."""
    folder = tmp_path / "cpp"
    folder.mkdir()
    for name in ("library.cpp", "kernels.cpp"):
        (folder / name).write_text(SMALL.replace("small", name[:4]))
    (folder / _build.PROBE).write_text(SMALL)
    monkeypatch.setattr(_build, "SOURCES", folder)
    return folder


def test_every_file_of_the_platform_is_built(tmp_path: Path, sources: Path, compiler: _build.Compiler) -> None:
    target = _targets.TARGETS[PLATFORM]
    manifest = _build.build(tmp_path / "native", compiler=compiler)
    names = {target.library(name) for name in target.instruction_sets} | ({target.probe} if target.probe else set())
    assert manifest["files"].keys() == names
    assert {path.name for path in (tmp_path / "native").iterdir()} == names | {_targets.MANIFEST}
    assert json.loads((tmp_path / "native" / _targets.MANIFEST).read_text()) == manifest
    assert (manifest["platform"], manifest["compiler"]) == (PLATFORM, compiler.name)
    library = _library._load(tmp_path / "native" / target.library(target.instruction_sets[0]), manifest["files"])
    assert library.polyattn_libr() == library.polyattn_kern() == 3


def test_a_build_that_fails_changes_nothing(tmp_path: Path, sources: Path, compiler: _build.Compiler) -> None:
    folder = tmp_path / "native"
    _build.build(folder, compiler=compiler)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (sources / "kernels.cpp").write_text("int f() { return undeclared_name; }\n")
    with pytest.raises(_build.BuildError, match=r"error: .*undeclared_name") as caught:
        _build.build(folder, compiler=compiler)
    assert str(caught.value).startswith(compiler.name)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    _build.give_reason(folder, str(caught.value))
    assert "undeclared_name" in (folder / _targets.REASON).read_text()
    assert not (folder / _targets.MANIFEST).exists()
    (sources / "kernels.cpp").write_text(SMALL)
    _build.build(folder, compiler=compiler)
    assert not (folder / _targets.REASON).exists()


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(_build.compilers()) == []
    with pytest.raises(_build.BuildError, match=r"there is no C\+\+ compiler"):
        _build.build(tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_what_cannot_be_built(tmp_path: Path) -> None:
    with pytest.raises(_build.BuildError, match="there are no native kernels for plan9-alpha"):
        _build.build(tmp_path, "plan9-alpha")
    with pytest.raises(_build.BuildError, match=f"{PLATFORM} has no instruction set sse2"):
        _build.build(tmp_path, instruction_sets=["sse2"])
    other = next(name for name in _targets.TARGETS if name != PLATFORM)
    with pytest.raises(_build.BuildError, match=f"g compiles only for {PLATFORM}"):
        _build.build(tmp_path, other, compiler=_build.Compiler("g", ("g",)))
    with pytest.raises(_build.BuildError, match="nothing cannot be started"):
        _build.build(tmp_path, compiler=_build.Compiler("nothing", (str(tmp_path / "nothing"),)))
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polyattn_native._build", "--folder", str(tmp_path / "native")]
    done = subprocess.run([*command, "--instruction-set", "sse2"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.strip() == f"nothing was built: {PLATFORM} has no instruction set sse2"


def build_wheel(tmp_path: Path, **variables: str) -> Path:
    """Build the project's wheel as pip does, without an environment of its own."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], env=environment, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    return wheel


def test_a_wheel_without_a_compiler_says_why(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="nox -s minimal, which installs hatchling")
    if importlib.util.find_spec("ziglang"):
        pytest.skip("zig is installed here")
    wheel = build_wheel(tmp_path, PATH=str(tmp_path))
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        libraries = [name for name in packed.namelist() if name.startswith("polyattn_native/_lib/")]
        assert libraries == [f"polyattn_native/_lib/{_targets.REASON}"]
        reason = packed.read(libraries[0]).decode()
    assert reason.startswith("the build failed: there is no C++ compiler")
