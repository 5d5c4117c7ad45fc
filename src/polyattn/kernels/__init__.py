"""Attention kernels: the problem, its masks, the generic kernel and the choice among a backend's kernels.

This package imports no backend: the namespace, the hooks and the list of kernels are arguments.
"""

from __future__ import annotations

from ._alibi import AlibiBias
from ._arrays import FLOAT_DTYPES, Array, cast, dtype_name, expand, unbroadcast, wide, widen
from ._block_mask import BlockMask
from ._choice import GENERIC, candidates, choose, named, refusal
from ._dropout import THREEFRY
from ._merge import merge, statistics_of_lse
from ._prefix_mask import PrefixMask
from ._problem import AttentionGrads, Kernel, Problem, RowStatistics, Sizes
from ._records import Record, Structure, flatten, holds
from ._relative_positions import RelativePositionBias
from ._structure import BothMasks, StructuredBias, StructuredMask
from ._tiled import TiledKernel, allowed_in, in_tiles_of, loops, reach, tile_lengths, unrounded, with_statistics
from ._units import is_moderate

__all__ = [
    "FLOAT_DTYPES",
    "GENERIC",
    "THREEFRY",
    "AlibiBias",
    "Array",
    "AttentionGrads",
    "BlockMask",
    "BothMasks",
    "Kernel",
    "PrefixMask",
    "Problem",
    "Record",
    "RelativePositionBias",
    "RowStatistics",
    "Sizes",
    "Structure",
    "StructuredBias",
    "StructuredMask",
    "TiledKernel",
    "allowed_in",
    "candidates",
    "cast",
    "choose",
    "dtype_name",
    "expand",
    "flatten",
    "holds",
    "in_tiles_of",
    "is_moderate",
    "loops",
    "merge",
    "named",
    "reach",
    "refusal",
    "statistics_of_lse",
    "tile_lengths",
    "unbroadcast",
    "unrounded",
    "wide",
    "widen",
    "with_statistics",
]
