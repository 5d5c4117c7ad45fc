"""Attention and other operations on the CPU in C++, which the backends of numpy and torch put before their own.

The package is optional: without a library for this machine :func:`status` gives the reason, and every backend
computes as it would without this package.
"""

from __future__ import annotations

from ._arrays import BFLOAT16
from ._kernel import NativeKernel
from ._library import Library, library, note, status
from ._pointwise import operation, operations

__all__ = ["BFLOAT16", "Library", "NativeKernel", "library", "note", "operation", "operations", "status"]
