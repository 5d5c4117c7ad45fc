"""Peak memory of a call in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._subject import Declared

__all__ = ["peak_of"]

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of(run: Callable[[], Any]) -> int:
    """Return the maximal resident set during a call, less that before it, in bytes."""
    gc.collect()
    try:
        CLEAR.write_text("5", encoding="ascii")  # resets VmHWM
    except OSError:
        raise Declared("memory is measured by /proc/self/clear_refs, which only Linux has") from None
    before = resident("VmRSS")
    run()
    return max(resident("VmHWM") - before, 0)


def resident(field: str) -> int:
    """Return the resident set in bytes: the current (VmRSS) or the maximal one (VmHWM)."""
    lines = STATUS.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
