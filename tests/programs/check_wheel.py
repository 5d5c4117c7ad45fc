"""Check that wheels have exactly the files of the source tree and the native libraries of their platform.

``python check_wheel.py WHEEL...``; every wheel must have native libraries.
"""

import hashlib
import json
import struct
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "backends" / "polyattn_native"))
from _targets import MANIFEST, REASON, TARGETS  # noqa: E402  # the module alone: the package needs NumPy

LIBRARIES = "polyattn_native/_lib/"
# The first bytes of the libraries of a system, and where the number of the machine is in them.
ELF, MACH_O, PE = (b"\x7fELF", 18, "<H"), (b"\xcf\xfa\xed\xfe", 4, "<I"), (b"MZ", None, "<H")
FORMATS = {"linux": ELF, "musl": ELF, "macos": MACH_O, "windows": PE}
MACHINES = {"linux-x86_64": 62, "musl-x86_64": 62, "linux-aarch64": 183, "musl-aarch64": 183}
MACHINES |= {"macos-x86_64": 0x1000007, "macos-arm64": 0x100000C, "windows-x86_64": 0x8664}


def source_files() -> set[str]:
    """Return the names that the files of the source tree have in a wheel."""
    sources = [(ROOT / root, path) for root in ("src", "backends") for path in (ROOT / root).rglob("*")]
    names = {path.relative_to(root).as_posix() for root, path in sources if path.is_file()}
    return {name for name in names if not name.endswith((".pyc", ".pyo")) and not name.startswith(LIBRARIES)}


def machine_of(content: bytes, system: str) -> int | None:
    """Return the number of the machine that a library is for, or None if it is no library of the system."""
    magic, offset, kind = FORMATS[system]
    if not content.startswith(magic):
        return None
    if offset is None:  # the header of a PE file is at the offset that the older header names
        offset = struct.unpack_from("<I", content, 0x3C)[0] + 4
    return struct.unpack_from(kind, content, offset)[0]


def check(path: Path) -> str:
    """Check a wheel; return a line about it."""
    with zipfile.ZipFile(path) as wheel:
        packed = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    if LIBRARIES + REASON in packed:
        sys.exit(f"{path.name} has no native kernels: {packed[LIBRARIES + REASON].decode().strip()}")
    manifest = json.loads(packed[LIBRARIES + MANIFEST])
    target = TARGETS[manifest["platform"]]
    libraries = {LIBRARIES + target.library(name) for name in target.instruction_sets}
    libraries |= {LIBRARIES + target.probe} if target.probe else set()
    expected = source_files() | libraries | {LIBRARIES + MANIFEST}
    if packed.keys() != expected:
        missing, unexpected = sorted(expected - packed.keys()), sorted(packed.keys() - expected)
        sys.exit(f"{path.name}: missing {missing}, unexpected {unexpected}")
    for name in libraries:
        content, recorded = packed[name], manifest["files"][name.removeprefix(LIBRARIES)]
        if {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()} != recorded:
            sys.exit(f"{path.name}: {name} is not what the manifest says")
        machine = machine_of(content, manifest["platform"].partition("-")[0])
        if machine != MACHINES[manifest["platform"]]:
            sys.exit(f"{path.name}: {name} is for another machine ({machine})")
    if manifest["compiler"].startswith("zig") and target.tag not in path.name:
        sys.exit(f"{path.name}: expected the tag {target.tag}")
    return (
        f"{path.name}: {len(packed)} files, as in the source tree, {len(libraries)} of them by {manifest['compiler']}"
    )


for argument in sys.argv[1:]:
    print(check(Path(argument)))
