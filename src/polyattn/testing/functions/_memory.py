"""Peak memory of a call in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from ..._resident import reset_peak, resident
from ._subject import Declared

__all__ = ["peak_of"]


def peak_of(run: Callable[[], Any]) -> int:
    """Return the maximal resident set during a call, less that before it, in bytes."""
    gc.collect()
    try:
        reset_peak()
    except OSError:
        raise Declared("memory is measured by /proc/self/clear_refs, which only Linux has") from None
    before = resident("VmRSS")
    run()
    return max(resident("VmHWM") - before, 0)
