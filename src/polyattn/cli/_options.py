"""Parsing of options that several commands share."""

from __future__ import annotations

import re

from ._app import UsageError

__all__ = ["read_axes", "read_window", "where"]


def read_axes(option: str, text: str, least: int = 0) -> tuple[int, ...]:
    """Parse a shape, ``1,8,2048,64``, with at least ``least`` axes."""
    if not re.fullmatch(r"\d+(,\d+)*", text) or text.count(",") + 1 < least:
        many = f"{least} or more lengths" if least else "lengths"
        raise UsageError(f"{option}: expected {many} of axes like 1,8,2048,64, got {text!r}")
    return tuple(int(length) for length in text.split(","))


def read_window(option: str, text: str) -> tuple[int | None, int | None]:
    """Parse ``left,right``; an empty side is unbounded."""
    if not re.fullmatch(r"\d*,\d*", text):
        raise UsageError(f"{option}: expected LEFT,RIGHT like 128,0 (an empty side is unbounded), got {text!r}")
    left, right = (int(side) if side else None for side in text.split(","))
    return left, right


def where(backend: str | None, device: str | None) -> tuple[str, str]:
    """Return a usable backend and device: those of the options, else the selected ones, else NumPy's."""
    from .. import registry
    from ..selection import selected

    selection = selected(backend, device)
    chosen = registry.ready("numpy" if selection is None else selection.backend)
    return chosen.name, (selection.device if selection else None) or chosen.devices()[0]
