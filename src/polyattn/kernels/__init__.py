"""Attention kernels: the problem, its masks, the generic kernel and the choice among a backend's kernels.

This floor knows no backend: it is handed the namespace, the hooks and the list of kernels.
"""

from __future__ import annotations

from ._arrays import FLOAT_DTYPES, Array, cast, dtype_name, expand, unbroadcast, wide, widen
from ._choice import GENERIC, candidates, choose, named
from ._merge import merge
from ._problem import Kernel, Problem, Sizes
from ._tiled import TiledKernel, allowed_in, loops, tile_lengths

__all__ = [
    "FLOAT_DTYPES",
    "GENERIC",
    "Array",
    "Kernel",
    "Problem",
    "Sizes",
    "TiledKernel",
    "allowed_in",
    "candidates",
    "cast",
    "choose",
    "dtype_name",
    "expand",
    "loops",
    "merge",
    "named",
    "tile_lengths",
    "unbroadcast",
    "wide",
    "widen",
]
