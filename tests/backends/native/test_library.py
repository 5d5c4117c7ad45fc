"""The choice of the native library, and that a file which is not right is refused with a reason, never loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import polyattn as pa
from polyattn_native import _build, _library, _targets

PLATFORM = _targets.host()
pytestmark = pytest.mark.skipif(PLATFORM not in _targets.TARGETS, reason=f"there are no native kernels for {PLATFORM}")
BEST = _targets.TARGETS[PLATFORM].instruction_sets[-1]


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Callable[..., _library.Library | str]:
    """Return ``status(**variables)``, which asks again, with these variables of the environment alone."""

    def ask(**variables: str) -> _library.Library | str:
        for name in ("POLYATTN_NATIVE", "POLYATTN_NATIVE_FOLDER"):
            monkeypatch.setenv(name, variables.get(name, ""))
        return _library.status.__wrapped__()

    return ask


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A copy of the folder of the library files."""
    found = _library.status()
    if isinstance(found, str):
        pytest.skip(found)
    return Path(shutil.copytree(found.path.parent, tmp_path / "native"))


def own_file(folder: Path) -> Path:
    """Return the file that this CPU would load from a folder."""
    found = _library.status()
    assert not isinstance(found, str), found
    return folder / found.path.name


def change_manifest(folder: Path, **entries: object) -> None:
    path = folder / _targets.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_the_library_of_this_machine(status: Callable[..., _library.Library | str], built: Path) -> None:
    found = status(POLYATTN_NATIVE_FOLDER=str(built))
    assert not isinstance(found, str), found
    assert found.path == own_file(built)
    assert found.instruction_set in _targets.TARGETS[PLATFORM].instruction_sets
    assert isinstance(_library.library(), type(found.functions))


def test_it_can_be_switched_off(status: Callable[..., _library.Library | str]) -> None:
    assert status(POLYATTN_NATIVE="0") == "switched off by POLYATTN_NATIVE=0"


def test_it_can_be_required(status: Callable[..., _library.Library | str], built: Path, tmp_path: Path) -> None:
    assert not isinstance(status(POLYATTN_NATIVE="1", POLYATTN_NATIVE_FOLDER=str(built)), str)
    with pytest.raises(pa.BackendUnavailableError, match=r"POLYATTN_NATIVE=1, but .*not built: run python -m"):
        status(POLYATTN_NATIVE="1", POLYATTN_NATIVE_FOLDER=str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", _targets.TARGETS[PLATFORM].instruction_sets if PLATFORM in _targets.TARGETS else ())
def test_each_instruction_set_can_be_chosen(
    name: str, status: Callable[..., _library.Library | str], built: Path
) -> None:
    automatic = status()
    assert not isinstance(automatic, str)
    names = _targets.TARGETS[PLATFORM].instruction_sets
    if names.index(name) > names.index(automatic.instruction_set):
        with pytest.raises(pa.BackendUnavailableError, match=f"{name} is wanted, .* and this CPU has "):
            status(POLYATTN_NATIVE=name)
        return
    found = status(POLYATTN_NATIVE=name)
    assert not isinstance(found, str)
    assert found.instruction_set == name
    assert name in found.path.name


@pytest.mark.parametrize("text", ["2", "yes", "-1", "avx2"])
def test_another_value_is_an_error(text: str, status: Callable[..., _library.Library | str]) -> None:
    with pytest.raises(
        pa.ArgumentError, match=f"POLYATTN_NATIVE: expected 0, 1 or an instruction set .*, got '{text}'"
    ):
        status(POLYATTN_NATIVE=text)


def test_the_reason_of_a_failed_build(status: Callable[..., _library.Library | str], tmp_path: Path) -> None:
    _build.give_reason(tmp_path, "there is no C++ compiler")
    reason = "the build failed: there is no C++ compiler"
    assert status(POLYATTN_NATIVE_FOLDER=str(tmp_path)) == reason


@pytest.mark.parametrize("length", [0, 100, 5000, -1])
def test_a_file_that_is_cut_off(length: int, status: Callable[..., _library.Library | str], built: Path) -> None:
    path = own_file(built)
    path.write_bytes(path.read_bytes()[:length])
    assert status(POLYATTN_NATIVE_FOLDER=str(built)) == f"{path} is damaged: it is not the file that was built"


@pytest.mark.parametrize("offset", [0, 4, 18, 64, -1000])
def test_a_file_with_another_byte(offset: int, status: Callable[..., _library.Library | str], built: Path) -> None:
    path = own_file(built)
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
    assert status(POLYATTN_NATIVE_FOLDER=str(built)) == f"{path} is damaged: it is not the file that was built"


def test_a_file_that_is_missing(status: Callable[..., _library.Library | str], built: Path) -> None:
    path = own_file(built)
    path.unlink()
    assert status(POLYATTN_NATIVE_FOLDER=str(built)) == f"{path} cannot be read (No such file or directory)"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": []}', '{"files": {}}', "\x00\xff"])
def test_a_manifest_that_is_damaged(text: str, status: Callable[..., _library.Library | str], built: Path) -> None:
    (built / _targets.MANIFEST).write_text(text, encoding="latin-1")
    reason = status(POLYATTN_NATIVE_FOLDER=str(built))
    assert isinstance(reason, str)
    assert reason.startswith(f"{built / _targets.MANIFEST} cannot be read")


def test_a_platform_without_native_kernels(
    status: Callable[..., _library.Library | str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_library, "host", lambda: "plan9-alpha")
    assert status() == "there are no native kernels for plan9-alpha"


def test_files_for_another_platform(status: Callable[..., _library.Library | str], built: Path) -> None:
    change_manifest(built, platform="windows-arm64")
    reason = status(POLYATTN_NATIVE_FOLDER=str(built))
    assert reason == f"the native library is for windows-arm64, and this is {PLATFORM}"


def test_files_from_other_sources(
    status: Callable[..., _library.Library | str], built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = Path(shutil.copytree(_targets.SOURCES, tmp_path / "cpp"))
    monkeypatch.setattr(_library, "SOURCES", changed)
    assert not isinstance(status(POLYATTN_NATIVE_FOLDER=str(built)), str)
    (changed / "abi.h").write_text((changed / "abi.h").read_text() + "\n")
    reason = "the native library was built from other sources: run python -m polyattn_native._build"
    assert status(POLYATTN_NATIVE_FOLDER=str(built)) == reason


def test_a_file_that_is_no_library(status: Callable[..., _library.Library | str], built: Path) -> None:
    path = own_file(built)
    path.write_bytes(b"no library")
    change_manifest(built, files={file.name: _build._described(file) for file in built.glob("lib*")})
    assert str(status(POLYATTN_NATIVE_FOLDER=str(built))).startswith(f"{path} cannot be loaded (")


def test_a_library_of_something_else(status: Callable[..., _library.Library | str], built: Path) -> None:
    probe = _targets.TARGETS[PLATFORM].probe
    if probe is None:
        pytest.skip("this platform has no probe")
    path = own_file(built)
    shutil.copy(built / probe, path)
    change_manifest(built, files={file.name: _build._described(file) for file in built.glob("lib*")})
    assert status(POLYATTN_NATIVE_FOLDER=str(built)) == f"{path} is not a library of polyattn"


def test_a_library_of_another_version(
    status: Callable[..., _library.Library | str], built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_library, "ABI_VERSION", 99)
    assert "of the interface, and this package needs 99" in str(status(POLYATTN_NATIVE_FOLDER=str(built)))


@pytest.mark.parametrize("structure", _library.STRUCTURES)
def test_a_library_with_other_structures(
    structure: type, status: Callable[..., _library.Library | str], built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(other for other in _library.STRUCTURES if other is not structure)
    monkeypatch.setattr(_library, "STRUCTURES", others)
    assert "argument structures" in str(status(POLYATTN_NATIVE_FOLDER=str(built)))


@pytest.mark.parametrize("count", range(3))
def test_a_cpu_that_lacks_instruction_sets(
    count: int, status: Callable[..., _library.Library | str], built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = _targets.X86_64[:count]
    if _targets.TARGETS[PLATFORM].instruction_sets != _targets.X86_64:
        pytest.skip("a platform with one instruction set")
    monkeypatch.setattr(_library, "_runnable", lambda *_: names)
    found = status()
    if not names:
        assert isinstance(found, str)
        assert found.endswith(f"and this CPU has none of {', '.join(_targets.X86_64)}")
    else:
        assert not isinstance(found, str)
        there = [name for name in names if (built / _targets.TARGETS[PLATFORM].library(name)).exists()]
        assert found.instruction_set == there[-1]
    with pytest.raises(pa.BackendUnavailableError, match=f"{BEST} is wanted, .* and this CPU has "):
        status(POLYATTN_NATIVE=BEST)


def test_users_are_told(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_NUM_THREADS", "1")
    found = _library.status()
    assert not isinstance(found, str)
    assert _library.note("numpy") == f"native kernels for {found.instruction_set}, 1 thread"
    monkeypatch.setattr(_library, "status", lambda: "a reason")
    assert _library.note("numpy") == "no native kernels: a reason"
    monkeypatch.setenv("POLYATTN_NUM_THREADS", "x")
    assert _library.note("numpy").startswith("no native kernels: POLYATTN_NUM_THREADS: expected")
