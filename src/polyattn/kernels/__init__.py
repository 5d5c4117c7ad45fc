"""Attention kernels: the problem, its masks, the generic kernel and the choice among a backend's kernels.

This floor knows no backend: it is handed the namespace, the hooks and the list of kernels.
"""

from __future__ import annotations

from ._arrays import FLOAT_DTYPES, Array, cast, dtype_name, expand, unbroadcast, wide, widen
from ._choice import GENERIC, candidates, choose, named
from ._problem import Kernel, Problem, Sizes

__all__ = [
    "FLOAT_DTYPES",
    "GENERIC",
    "Array",
    "Kernel",
    "Problem",
    "Sizes",
    "candidates",
    "cast",
    "choose",
    "dtype_name",
    "expand",
    "named",
    "unbroadcast",
    "wide",
    "widen",
]
