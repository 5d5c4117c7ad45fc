"""The machine on which a comparison runs, and its load."""

from __future__ import annotations

import importlib
import os
import platform
from pathlib import Path

from ._contestant import index_of
from ._threads import cores

__all__ = ["Others", "available_memory", "machine"]


def machine(device: str) -> dict[str, str | int | float]:
    """Return a description of the machine: processor, cores, memory, system, and the name of a CUDA device.

    The host name is not included.
    """
    cpu = _fields("/proc/cpuinfo")
    names = (cpu[name] for name in ("model name", "Hardware", "cpu model") if name in cpu)
    found: dict[str, str | int | float] = {
        "processor": next(names, platform.processor() or platform.machine()),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_gib": round(_memory("MemTotal") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }
    return found | ({"device": _cuda_name(index_of(device))} if device.startswith("cuda") else {})


def available_memory() -> int:
    """Return the available memory in bytes; 0 if it is unknown."""
    return _memory("MemAvailable")


class Others:
    """The load by other processes since the object was created; with a high load timings are unreliable."""

    def __init__(self) -> None:
        self._began = self._now()

    def share(self) -> float | None:
        """Return the fraction of the cores' time that other processes used; None if it is unknown."""
        if self._began is None or (now := self._now()) is None:
            return None
        everyone, own, total = (after - before for after, before in zip(now, self._began, strict=True))
        return round(max(everyone - own, 0.0) / total, 3) if total > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Return the cores' busy time, the part of this process and its children, and the total time, in seconds."""
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        except OSError:
            return None
        user, nice, system, idle, waiting, interrupts, soft, stolen = (int(x) for x in line.split()[1:9])
        busy, tick, own = user + nice + system + interrupts + soft + stolen, os.sysconf("SC_CLK_TCK"), os.times()
        return busy / tick, sum(own[:4]), (busy + idle + waiting) / tick


def _memory(field: str) -> int:
    fields = _fields("/proc/meminfo")
    if field in fields:
        return int(fields[field].split()[0]) * 1024
    known = field == "MemTotal" and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else 0


def _fields(path: str) -> dict[str, str]:
    """Return the lines ``name: value`` of a file, the first of each name; empty if there is no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    parts = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def _cuda_name(index: int) -> str:
    """Return the name of a CUDA device, by torch or CuPy."""
    try:
        return str(importlib.import_module("torch").cuda.get_device_name(index))
    except (ImportError, AssertionError, RuntimeError):
        runtime = importlib.import_module("cupy").cuda.runtime
        return str(runtime.getDeviceProperties(index)["name"].decode())
