"""The platforms for which there are native libraries, their instruction sets, and the files of a build.

The build hook uses this module before anything is installed, so it imports only the standard library.
"""

from __future__ import annotations

import hashlib
import platform
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

__all__ = ["MANIFEST", "REASON", "SOURCES", "TARGETS", "Target", "digest", "host"]

SOURCES = Path(__file__).with_name("cpp")

MANIFEST = "manifest.json"
REASON = "reason.txt"

X86_64 = ("x86-64-v3", "x86-64-v4", "x86-64-v4-bf16")
"""In the order of the bits of ``polyattn_cpu`` in cpp/probe.cpp, the best one last."""


class Target(NamedTuple):
    """A platform: its name for zig, the tag of its wheel, its instruction sets, and how its libraries are called."""

    triple: str
    tag: str
    instruction_sets: tuple[str, ...]
    suffix: str

    def library(self, instruction_set: str) -> str:
        """Return the name of the file for an instruction set."""
        return f"libpolyattn-{instruction_set}{self.suffix}"

    @property
    def probe(self) -> str | None:
        """The name of the file that asks the CPU; None if all CPUs of the platform have the one instruction set."""
        return f"libpolyattn-probe{self.suffix}" if len(self.instruction_sets) > 1 else None


TARGETS = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", X86_64, ".so"),
    "linux-aarch64": Target("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", ("aarch64",), ".so"),
    "musl-x86_64": Target("x86_64-linux-musl", "musllinux_1_2_x86_64", X86_64, ".so"),
    "musl-aarch64": Target("aarch64-linux-musl", "musllinux_1_2_aarch64", ("aarch64",), ".so"),
    "macos-x86_64": Target("x86_64-macos.11.0", "macosx_11_0_x86_64", X86_64, ".dylib"),
    "macos-arm64": Target("aarch64-macos.11.0", "macosx_11_0_arm64", ("aarch64",), ".dylib"),
    "windows-x86_64": Target("x86_64-windows-gnu", "win_amd64", X86_64, ".dll"),
}


def digest(sources: Path) -> str:
    """Return the SHA-256 of all files of a folder and their names."""
    found = hashlib.sha256()
    for path in sorted(sources.glob("*.*")):
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def host() -> str:
    """Return the platform of this interpreter: a key of ``TARGETS``, or the name of one for which there is nothing."""
    if sys.platform == "win32":
        return {"win-amd64": "windows-x86_64"}.get(sysconfig.get_platform(), sysconfig.get_platform())
    bits = "" if sys.maxsize > 2**32 else " (32 bits)"
    musl = sys.platform == "linux" and "musl" in str(sysconfig.get_config_var("HOST_GNU_TYPE"))
    system = "musl" if musl else {"darwin": "macos"}.get(sys.platform, sys.platform)
    return f"{system}-{platform.machine()}{bits}"
