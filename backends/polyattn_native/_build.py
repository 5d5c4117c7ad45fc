"""The build of the native library: ``python -m polyattn_native._build``, or the hook of a wheel's build.

It uses ``zig c++`` if the package ziglang is installed, which compiles for every platform, else a compiler of this
machine for this machine. The build hook uses this module before anything is installed, so it imports only the standard
library.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ._targets import MANIFEST, REASON, SOURCES, TARGETS, Target, digest, host

__all__ = ["BuildError", "Compiler", "build", "compilers", "give_reason"]

PROBE = "probe.cpp"
# No -ffast-math: NaN and infinity must be what they are.
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros",
    "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fvisibility=hidden", "-Wall", "-Wextra",
)  # fmt: skip
# Clang honours the pragma of unfused.h, which allows no fused product, only if it is told to.
CLANG_FLAGS = ("-ffp-contract=fast-honor-pragmas",)
GCC_FLAGS = ("-ffp-contract=fast", "-Wno-maybe-uninitialized")  # GCC warns of its own header for AVX-512
BF16 = "x86-64-v4-bf16"
# The options of each instruction set, for GCC and Clang and for zig.
MACHINE = {
    "x86-64-v3": (("-march=x86-64-v3",), ("-mcpu=x86_64_v3",)),
    "x86-64-v4": (("-march=x86-64-v4", "-mprefer-vector-width=512"), ("-mcpu=x86_64_v4", "-mprefer-vector-width=512")),
    BF16: (
        ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
        ("-mcpu=x86_64_v4+avx512bf16", "-mprefer-vector-width=512"),
    ),
    "aarch64": ((), ()),
    PROBE: ((), ()),
}


class BuildError(Exception):
    """The reason why nothing was built."""


class Compiler(NamedTuple):
    """A C++ compiler of GCC's or Clang's options."""

    name: str
    command: tuple[str, ...]
    zig: bool = False

    @property
    def clang(self) -> bool:
        """Whether it is Clang, as zig is."""
        return self.zig or "clang" in self.name


class Piece(NamedTuple):
    """A library file to be built: for an instruction set, or the probe."""

    file: str
    machine: str
    sources: tuple[Path, ...]


def compilers() -> Iterator[Compiler]:
    """Yield the compilers that are there, the one to be tried first."""
    if importlib.util.find_spec("ziglang") is not None:
        yield from _compiler((sys.executable, "-m", "ziglang"), zig=True)
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    there = {Path(path).resolve(): path for name in names if (path := shutil.which(name)) is not None}
    for path in there.values():
        yield from _compiler((path,))


def _compiler(command: tuple[str, ...], zig: bool = False) -> Iterator[Compiler]:
    """Yield the compiler if it runs, with its version."""
    try:
        found = subprocess.run(
            [*command, "version" if zig else "--version"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return
    version = found.stdout.partition("\n")[0].strip()
    yield Compiler(f"zig {version}", (*command, "c++"), True) if zig else Compiler(version, command)


def build(
    folder: Path,
    platform: str | None = None,
    instruction_sets: Sequence[str] | None = None,
    compiler: Compiler | None = None,
    flags: Iterable[str] = (),
) -> Mapping[str, Any]:
    """Build the libraries of a platform (this one by default) in ``folder``, and return the manifest.

    Raises
    ------
    BuildError
        If nothing was built, with the reason of each compiler; ``folder`` is as before.
    """
    platform = platform or host()
    if platform not in TARGETS:
        raise BuildError(f"there are no native kernels for {platform}")
    target = TARGETS[platform]
    unknown = set(instruction_sets or ()) - set(target.instruction_sets)
    if unknown:
        raise BuildError(f"{platform} has no instruction set {', '.join(sorted(unknown))}")
    reasons = []
    for candidate in compilers() if compiler is None else (compiler,):
        if not candidate.zig and platform != host():
            reasons.append(f"{candidate.name} compiles only for {host()}")
            continue
        try:
            return _build(folder, platform, instruction_sets or target.instruction_sets, candidate, tuple(flags))
        except BuildError as error:
            reasons.append(str(error))
    raise BuildError("; ".join(reasons) or "there is no C++ compiler: neither the package ziglang, g++ nor clang++")


def _build(
    folder: Path, platform: str, instruction_sets: Sequence[str], compiler: Compiler, flags: tuple[str, ...]
) -> Mapping[str, Any]:
    """Build with one compiler in a temporary folder, then move the files, the manifest last."""
    target = TARGETS[platform]
    version = digest(SOURCES)
    sources = tuple(path for path in sorted(SOURCES.glob("*.cpp")) if path.name != PROBE)
    pieces = [Piece(target.library(name), name, sources) for name in instruction_sets]
    if target.probe:
        pieces.append(Piece(target.probe, PROBE, (SOURCES / PROBE,)))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        temporary = Path(made)
        _compile(pieces, temporary, target, compiler, flags)
        files = {piece.file: _described(temporary / piece.file) for piece in pieces}
        manifest = {"platform": platform, "compiler": compiler.name, "sources": version, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for old in (MANIFEST, REASON):
            (folder / old).unlink(missing_ok=True)
        for name in (*files, MANIFEST):
            os.replace(temporary / name, folder / name)
    return manifest


def give_reason(folder: Path, reason: str) -> None:
    """Leave the reason why a build failed, in place of the manifest, for the package to give it when it is used."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    (folder / REASON).write_text(f"the build failed: {reason}\n", encoding="utf-8")


def _described(path: Path) -> Mapping[str, Any]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _compile(
    pieces: Sequence[Piece], temporary: Path, target: Target, compiler: Compiler, flags: tuple[str, ...]
) -> None:
    """Compile each source of each piece, several at a time, then link the pieces."""
    common = (*compiler.command, *(("-target", target.triple, "-fno-sanitize=undefined") if compiler.zig else ()))
    environment = _environment(temporary) if compiler.zig else None

    def objects(piece: Piece) -> list[Path]:
        return [temporary / f"{piece.file}.{source.stem}.o" for source in piece.sources]

    def compiled(piece: Piece, source: Path, into: Path) -> None:
        machine = MACHINE[piece.machine][compiler.zig]
        named = f'-DPOLYATTN_INSTRUCTION_SET="{piece.machine}"'
        options = (*FLAGS, *(CLANG_FLAGS if compiler.clang else GCC_FLAGS), *machine, named, *flags)
        _run(compiler, (*common, *options, "-c", str(source), "-o", str(into)), environment)

    def linked(piece: Piece) -> None:
        # Clang's driver would link its C++ runtime; GCC leaves it out where nothing is used.
        runtime = ("-nostdlib++",) if compiler.clang else ("-Wl,--as-needed",)
        strip = () if target.suffix == ".dylib" and not compiler.zig else ("-s",)
        options = (*runtime, *(() if flags else strip), *flags)  # for any CPU: zig builds its own runtime once
        inputs = (*map(str, objects(piece)), *(("-lpthread",) if target.suffix == ".so" else ()))
        _run(compiler, (*common, "-shared", *options, *inputs, "-o", str(temporary / piece.file)), environment)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        work = [(piece, *pair) for piece in pieces for pair in zip(piece.sources, objects(piece), strict=True)]
        _finish(pool, compiled, work)
        _finish(pool, linked, [(piece,) for piece in pieces])


def _finish(pool: ThreadPoolExecutor, task: Callable[..., None], work: Iterable[tuple[Any, ...]]) -> None:
    """Run a task for each tuple of arguments; after a failure start no other one."""
    waiting = [pool.submit(task, *arguments) for arguments in work]
    try:
        for done in waiting:
            done.result()
    finally:
        for left in waiting:
            left.cancel()


def _run(compiler: Compiler, command: tuple[str, ...], environment: Mapping[str, str] | None) -> None:
    """Run the compiler; raise its first error line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    except OSError as error:
        raise BuildError(f"{compiler.name} cannot be started ({error})") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise BuildError(f"{compiler.name}: {next((line for line in lines if 'error' in line), lines[-1]).strip()}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)


def _environment(temporary: Path) -> Mapping[str, str]:
    """Return the environment for zig, whose cache is in the temporary folder if the user's is not writable."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    there = next((path for path in (cache, *cache.parents) if path.exists()), cache)
    kept = os.environ.get("ZIG_GLOBAL_CACHE_DIR") or sys.platform == "win32" or os.access(there, os.W_OK)
    own = (
        {} if kept else {"ZIG_GLOBAL_CACHE_DIR": str(temporary / "zig"), "ZIG_LOCAL_CACHE_DIR": str(temporary / "zig")}
    )
    return {**os.environ, **own}


def main() -> int:
    """Build from the command line."""
    parser = argparse.ArgumentParser(prog="python -m polyattn_native._build", description="Build the native library.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_name("_lib"))
    parser.add_argument("--platform", choices=TARGETS, help=f"this machine by default, {host()}")
    parser.add_argument("--instruction-set", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("flags", nargs="*", help="further options of the compiler, after --")
    given = parser.parse_args()
    began = time.perf_counter()
    try:
        manifest = build(given.folder, given.platform, given.instruction_set, flags=given.flags)
    except BuildError as error:
        print(f"nothing was built: {error}", file=sys.stderr)
        return 1
    for name, description in manifest["files"].items():
        print(f"{given.folder / name}  {description['size'] / 1024:.0f} KiB")
    print(f"{manifest['compiler']}, {time.perf_counter() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
