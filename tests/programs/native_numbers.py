"""Compare the native kernels for arm64, in an emulator, with those for x86-64: the numbers of native_numbers.cpp.

It needs Linux on x86-64, zig (the package ziglang) and ``qemu-aarch64`` (Debian: qemu-user).
"""

import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "backends" / "polyattn_native" / "cpp"
BUILDS = {"x86_64": "x86_64_v3", "aarch64": "generic"}


def built(machine: str, folder: str) -> str:
    """Compile the kernels and the program, linked statically; return the program's path."""
    program = f"{folder}/numbers-{machine}"
    sources = [path for path in SOURCES.glob("*.cpp") if path.name not in ("probe.cpp", "library.cpp")]
    options = ["-std=c++17", "-O3", "-ffp-contract=fast-honor-pragmas", "-fno-math-errno", "-fno-signed-zeros"]
    options += [
        "-nostdlib++",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-threadsafe-statics",
        "-fno-sanitize=undefined",
        "-static",
    ]
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-musl", f"-mcpu={BUILDS[machine]}"]
    inputs = map(str, [*sources, HERE / "native_numbers.cpp"])
    subprocess.run([*zig, *options, "-iquote", str(SOURCES), *inputs, "-o", program], check=True)
    return program


def numbers(*command: str) -> dict[str, tuple[float, list[float]]]:
    """Run a program; return the tolerance and the numbers of each name, the first of them the status."""
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: (float(tolerance), [*map(float, found)]) for name, tolerance, *found in map(str.split, lines)}


def main() -> None:
    """Compare, or say what is missing."""
    missing = [] if shutil.which("qemu-aarch64") else ["qemu-aarch64 (Debian: apt install qemu-user)"]
    missing += [] if (sys.platform, platform.machine()) == ("linux", "x86_64") else ["Linux on x86-64"]
    missing += [] if importlib.util.find_spec("ziglang") else ["ziglang"]
    if missing:
        print(f"the kernels for arm64 were not run, for this needs {' and '.join(missing)}")
        return
    with tempfile.TemporaryDirectory() as folder:
        expected = numbers(built("x86_64", folder))
        found = numbers("qemu-aarch64", built("aarch64", folder))
    for name, (tolerance, want) in expected.items():
        got = found[name][1]
        size = max(1.0, *map(abs, want))
        worst = max(abs(a - b) for a, b in zip(got, want, strict=True)) / size
        print(f"{name:20} differs by {worst:.1e}, at most {tolerance:.0e} is allowed")
        if want[0] != 0 or not worst <= tolerance:
            sys.exit(f"{name} on arm64: {got}, on x86-64: {want}")


main()
