"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ._threads import cores

__all__ = ["Others", "available_memory", "machine"]

_CPU_NAMES = ("model name", "Hardware", "cpu model")


def machine(device: str) -> dict[str, str | int | float]:
    """Return the machine in words and numbers: processor, cores, memory, system, and the name of a CUDA device.

    It is not named: two machines of a kind are the same here.
    """
    found: dict[str, str | int | float] = {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_gib": round(_memory("MemTotal") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }
    if device.startswith("cuda"):
        found["device"] = _cuda_name(int(device.partition(":")[2] or 0))
    return found


def available_memory() -> int:
    """Return the bytes that a process may still take; 0 where the system does not say."""
    return _memory("MemAvailable")


class Others:
    """How busy other processes keep the cores from here on: where they do, figures mean little."""

    def __init__(self) -> None:
        self._began = self._now()

    def share(self) -> float | None:
        """Return the part of all cores' time that others have used, from 0 to 1; None where the system does not say."""
        if self._began is None or (now := self._now()) is None:
            return None
        everyone, own, total = (after - before for after, before in zip(now, self._began, strict=True))
        return round(max(everyone - own, 0.0) / total, 3) if total > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Return the seconds in which the cores worked, those for this process and its children, and all there were."""
        try:
            line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
        except OSError:
            return None
        user, nice, system, idle, waiting, interrupts, soft, stolen = (int(x) for x in line.split()[1:9])
        busy, tick, own = user + nice + system + interrupts + soft + stolen, os.sysconf("SC_CLK_TCK"), os.times()
        used = own.user + own.system + own.children_user + own.children_system
        return busy / tick, used, (busy + idle + waiting) / tick


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    return next((named[name] for name in _CPU_NAMES if name in named), platform.machine())


def _memory(field: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        names = getattr(os, "sysconf_names", {})
        known = field == "MemTotal" and "SC_PHYS_PAGES" in names
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else 0


def _cuda_name(index: int) -> str:
    """Ask whichever library is there."""
    try:
        import torch

        return str(torch.cuda.get_device_name(index))
    except (ImportError, AssertionError, RuntimeError):
        import cupy

        return str(cupy.cuda.runtime.getDeviceProperties(index)["name"].decode())
