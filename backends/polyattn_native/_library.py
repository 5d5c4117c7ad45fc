"""The native library: which file this machine can run, the checks before it is loaded, and how to switch it off.

There is one file for each instruction set of a platform, and a manifest with the size and the SHA-256 of each. A file
that is cut off or damaged would end the process when it is mapped, and one for another instruction set when it is
called; so nothing is loaded before it is compared with the manifest, and the CPU is asked first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from polyattn.backend import ArgumentError, BackendUnavailableError

from ._structures import STRUCTURES
from ._targets import MANIFEST, REASON, SOURCES, TARGETS, Target, digest, host
from ._threads import thread_count

__all__ = ["Library", "library", "note", "status", "succeeded"]

VARIABLE = "POLYATTN_NATIVE"
FOLDER_VARIABLE = "POLYATTN_NATIVE_FOLDER"
BUILD = "python -m polyattn_native._build"
ABI_VERSION = 2
"""``ABI_VERSION`` of cpp/abi.h."""
MAGIC = int.from_bytes(b"polyattn", "little")


@dataclass(frozen=True)
class Library:
    """A loaded library."""

    functions: ctypes.CDLL
    instruction_set: str
    path: Path
    compiler: str


class Manifest(NamedTuple):
    """What the build recorded: the platform, the compiler, and the SHA-256 of the sources and of each file."""

    platform: str
    compiler: str
    sources: str
    files: Mapping[str, Any]


class Unusable(Exception):
    """The reason why there is no native library."""


class AbiSize(ctypes.Structure):
    """``struct AbiSize`` of cpp/library.cpp: the name of an argument structure and its size in bytes."""

    _fields_ = (("name", ctypes.c_char_p), ("size", ctypes.c_int64))


class Abi(ctypes.Structure):
    """``struct Abi`` of cpp/library.cpp: what a library says of itself."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("version", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("instruction_set", ctypes.c_char_p),
        ("sizes", ctypes.POINTER(AbiSize)),
    )


def library() -> ctypes.CDLL | str:
    """Return the library for this machine, or the reason why there is none; see :func:`status`."""
    found = status()
    return found if isinstance(found, str) else found.functions


@functools.cache
def status() -> Library | str:
    """Return the library for this machine, or the reason why there is none. The answer is kept for the process.

    ``POLYATTN_NATIVE=0`` switches it off; with 1, or the name of an instruction set, it is required.

    Raises
    ------
    ArgumentError
        If ``POLYATTN_NATIVE`` has another value.
    BackendUnavailableError
        If the library is required and cannot be used.
    """
    text = os.environ.get(VARIABLE, "").strip()
    names = [name for target in TARGETS.values() for name in target.instruction_sets]
    if text not in ("", "0", "1", *names):
        expected = ", ".join(dict.fromkeys(names))
        raise ArgumentError(f"{VARIABLE}: expected 0, 1 or an instruction set ({expected}), got {text!r}")
    if text == "0":
        return f"switched off by {VARIABLE}=0"
    try:
        return _find(text if text in names else None)
    except Unusable as reason:
        if text:
            raise BackendUnavailableError(f"{VARIABLE}={text}, but {reason}") from None
        return str(reason)


def succeeded(status: int) -> bool:
    """Return whether the results of a call are valid; raise MemoryError if there is no memory for its buffers."""
    if status > 0:
        raise MemoryError(f"there is no memory for a buffer of {status} bytes of the native library")
    return status == 0


def note(backend: str, missing: Callable[[], str | None] = lambda: None) -> str:
    """Return a line for users: the kernels and threads for the arrays of a backend, or why there are none.

    ``missing()`` is the backend's own reason why it cannot use the library, or None.
    """
    try:
        found, threads = status(), thread_count(backend)
        reason = found if isinstance(found, str) else missing()
    except (ArgumentError, BackendUnavailableError) as error:
        return f"no native kernels: {error}"
    if isinstance(found, str) or reason is not None:
        return f"no native kernels: {reason}"
    return f"native kernels for {found.instruction_set}, {threads} thread{'s' * (threads > 1)}"


def folder() -> Path:
    """Return the folder of the library files; ``POLYATTN_NATIVE_FOLDER`` names another one, for development."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).with_name("_lib"))


def _find(wanted: str | None) -> Library:
    """Load the file for the best instruction set of this CPU, or for the wanted one."""
    platform = host()
    if platform not in TARGETS:
        raise Unusable(f"there are no native kernels for {platform}")
    manifest = _manifest(folder())
    files = manifest.files
    if manifest.platform != platform:
        raise Unusable(f"the native library is for {manifest.platform}, and this is {platform}")
    if manifest.sources != digest(SOURCES):
        raise Unusable(f"the native library was built from other sources: run {BUILD}")
    target = TARGETS[platform]
    runnable = _runnable(folder(), target, files)
    built = [name for name in target.instruction_sets if target.library(name) in files]
    chosen = [name for name in built if name in runnable and wanted in (None, name)]
    if not chosen:
        wished = f"{wanted} is wanted, " if wanted else ""
        made = ", ".join(built) or "nothing"
        has = ", ".join(runnable) or f"none of {', '.join(target.instruction_sets)}"
        raise Unusable(f"{wished}the native library is built for {made}, and this CPU has {has}")
    path = folder() / target.library(chosen[-1])
    functions = _load(path, files)
    _check_abi(functions, chosen[-1], path)
    return Library(functions, chosen[-1], path, manifest.compiler)


def _manifest(at: Path) -> Manifest:
    """Read the manifest, or raise the reason why there is none."""
    path = at / MANIFEST
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(*(entries[name] for name in Manifest._fields))
        if tuple(map(type, manifest)) != (str, str, str, dict):
            raise TypeError("an entry has another type")
    except FileNotFoundError:
        raise Unusable(_reason_beside(at) or f"the native library is not built: run {BUILD}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"{path} cannot be read ({type(error).__name__}: {error})") from None
    return manifest


def _reason_beside(at: Path) -> str:
    """Return the reason that a failed build left, or an empty string."""
    try:
        return (at / REASON).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _runnable(at: Path, target: Target, files: Mapping[str, Any]) -> Sequence[str]:
    """Return the instruction sets of the target that this CPU has, the best one last."""
    if target.probe is None:
        return target.instruction_sets
    probe = _load(at / target.probe, files).polyattn_cpu
    probe.restype, probe.argtypes = ctypes.c_int32, ()
    return [name for bit, name in enumerate(target.instruction_sets) if probe() >> bit & 1]


def _load(path: Path, files: Mapping[str, Any]) -> ctypes.CDLL:
    """Load a file, after its size and SHA-256 have been compared with the manifest's."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Unusable(f"{path} cannot be read ({error.strerror})") from None
    if {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} != files.get(path.name):
        raise Unusable(f"{path} is damaged: it is not the file that was built")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise Unusable(f"{path} cannot be loaded ({error})") from None


def _check_abi(functions: ctypes.CDLL, instruction_set: str, path: Path) -> None:
    """Compare what the library says of itself with this package's structures."""
    try:
        handshake = functions.polyattn_abi
    except AttributeError:
        raise Unusable(f"{path} is not a library of polyattn") from None
    handshake.restype, handshake.argtypes = ctypes.POINTER(Abi), ()
    abi = handshake().contents
    if abi.magic != MAGIC or abi.version != ABI_VERSION:
        raise Unusable(f"{path} has version {abi.version} of the interface, and this package needs {ABI_VERSION}")
    if (abi.instruction_set or b"").decode() != instruction_set:
        raise Unusable(f"{path} is for {abi.instruction_set.decode()}")
    sizes = {abi.sizes[i].name.decode(): abi.sizes[i].size for i in range(abi.count)}
    expected = {structure.__name__: ctypes.sizeof(structure) for structure in STRUCTURES}
    if sizes != expected:
        raise Unusable(f"{path} has argument structures of {sizes} bytes, and this package has {expected}")
