"""Writing a plot to a file, atomically, and checking beforehand that it can be written."""

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
    """Require matplotlib, a name that ends in .png and an existing folder.

    Raises
    ------
    BackendUnavailableError
        If matplotlib is missing.
    ArgumentError
        If the name does not end in .png, or the folder does not exist.
    """
    expect_matplotlib()
    if path.suffix.lower() != ".png":
        raise ArgumentError(f"plot: expected a file whose name ends in .png, got {str(path)!r}")
    if not path.parent.is_dir():
        raise ArgumentError(f"plot: the folder {str(path.parent)!r} does not exist")


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    write_bytes(path, buffer.getvalue())
