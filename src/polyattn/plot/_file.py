"""A picture as a file: checked before the work, written whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import write_bytes
from ..errors import ArgumentError
from ._axes import expect_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["expect_writable", "write_png"]


def expect_writable(path: Path) -> None:
    """Require matplotlib, a name that ends in .png and a folder that is there.

    Raises
    ------
    BackendUnavailableError
        If matplotlib is missing.
    ArgumentError
        If the file is no PNG, or its folder does not exist.
    """
    expect_matplotlib()
    if path.suffix.lower() != ".png":
        raise ArgumentError(f"plot: expected a file whose name ends in .png, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ArgumentError(f"plot: the folder {str(path.parent)!r} does not exist")


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_bytes(path, buffer.getvalue())
