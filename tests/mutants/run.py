"""Run the conformance kit on copies of polyattn with one fault each, and say which faults it does not find.

``python tests/mutants/run.py [WORD…]``: only the mutants whose description contains a word. Each is run on
array-api-strict, whose only kernels are the generic ones, and until the first check that fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 2


class Mutant(NamedTuple):
    """One fault: the first occurrence of ``old`` in a file is replaced by ``new``."""

    what: str
    file: str
    old: str
    new: str


class Result(NamedTuple):
    """What the kit said: the first check that failed, or "" if none did."""

    mutant: Mutant
    check: str
    seconds: float


def mutants(words: list[str]) -> list[Mutant]:
    """Return the chosen mutants."""
    listed = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**one) for one in listed if not words or any(word in one["what"] for word in words)]


def copied(mutant: Mutant | None, folder: Path) -> dict[str, str]:
    """Copy polyattn with the fault, and return the environment in which the copy is imported."""
    for part in ("src", "backends"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "_lib", "cpp"))
    if mutant is not None:
        path = folder / mutant.file
        source = path.read_text(encoding="utf-8")
        if mutant.old not in source:
            raise SystemExit(f"{mutant.what}: {mutant.file} does not have {mutant.old!r}")
        path.write_text(source.replace(mutant.old, mutant.new, 1), encoding="utf-8")
    paths = os.pathsep.join(str(folder / part) for part in ("src", "backends"))
    unselected = {"POLYATTN_BACKEND": "", "POLYATTN_DEVICE": "", "POLYATTN_NATIVE": "0"}
    return {**os.environ, **unselected, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}


def first_failure(mutant: Mutant | None) -> Result:
    """Run the kit until the first failure."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="polyattn-mutant-") as name:
        environment = copied(mutant, Path(name))
        kit = ("-p", "polyattn.testing.plugin", "--pyargs", "polyattn.testing.conformance")
        options = ("--polyattn-backend=array-api-strict", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rfE")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *kit], cwd=name, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 0 and not said:
        said = [(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]]
    check = said[0].partition(" - ")[0].rpartition("conformance/")[2] if said else ""
    return Result(mutant or Mutant("", "", "", ""), check, time.perf_counter() - start)


def main() -> int:
    """Run all; return 1 if a fault is not found."""
    sound = first_failure(None)
    if sound.check:
        print(f"without a fault, {sound.check} fails: nothing can be measured")
        return 2
    chosen = mutants(sys.argv[1:])
    with ThreadPoolExecutor(PROCESSES) as pool:
        results = []
        for result in pool.map(first_failure, chosen):
            results.append(result)
            print(f"{result.check or 'NOT FOUND':60} {result.seconds:4.0f} s  {result.mutant.what}", flush=True)
    missed = [result.mutant.what for result in results if not result.check]
    print(f"{len(results) - len(missed)} of {len(results)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
