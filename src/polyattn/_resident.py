"""The resident memory of this process, on Linux."""

from __future__ import annotations

from pathlib import Path

from .errors import PolyattnError

__all__ = ["reset_peak", "resident"]


def reset_peak() -> None:
    """Begin a new maximum of the resident set; raise OSError if the system does not allow it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident(field: str) -> int:
    """Return the resident set in bytes, the current (VmRSS) or the maximal one (VmHWM)."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    except (OSError, StopIteration):
        raise PolyattnError("memory is measured by /proc/self/status, which only Linux has") from None
