"""Attention and other operations on the CPU in C++, which the backends put before their own.

The package is optional: without a library for this machine :func:`status` gives the reason, and every backend
computes as it would without this package.
"""

from __future__ import annotations

from ._arguments import refusal
from ._arrays import BFLOAT16
from ._foreign import ForeignCall, constants, foreign_call
from ._kernel import NativeKernel
from ._library import Library, library, note, status
from ._pointwise import LEAST_ROWS, operation, operations
from ._threads import thread_count

__all__ = [
    "BFLOAT16",
    "LEAST_ROWS",
    "ForeignCall",
    "Library",
    "NativeKernel",
    "constants",
    "foreign_call",
    "library",
    "note",
    "operation",
    "operations",
    "refusal",
    "status",
    "thread_count",
]
