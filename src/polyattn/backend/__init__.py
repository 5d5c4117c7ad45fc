"""The backend contract: the class that a plugin implements, and all names that it may import.

A plugin is a package with an entry point in the group ``polyattn.backends``
that resolves to an instance of a subclass of :class:`Backend`::

    [project.entry-points."polyattn.backends"]
    mylib = "polyattn_mylib:backend"

The import of a plugin must not import the array library: polyattn loads all
plugins to find the owner of an array, also those with unused libraries. A
subclass must implement the methods in the first half of the class; each hook in
the second half has a fallback that uses only the array API standard.

A backend has no state except the caches of its library, because polyattn calls
it from several threads at one time.
"""

from __future__ import annotations

from .._scopes import Scope, silenced
from ..errors import (
    ArgumentError,
    BackendMismatchError,
    BackendUnavailableError,
    DTypeError,
    KernelUnsupportedError,
    PolyattnError,
    ShapeError,
)
from ..kernels import (
    THREEFRY,
    AlibiBias,
    Array,
    AttentionGrads,
    BlockMask,
    BothMasks,
    Kernel,
    PrefixMask,
    Problem,
    Record,
    RelativePositionBias,
    RowStatistics,
    Sizes,
    Structure,
    StructuredBias,
    StructuredMask,
    TiledKernel,
    allowed_in,
    dtype_name,
    expand,
    flatten,
    in_tiles_of,
    statistics_of_lse,
    unbroadcast,
)
from ..kernels._backward_vjp import backward_vjp as attention_backward_vjp
from ..kernels._jvp import Tangents
from ..kernels._jvp import jvp as attention_tangents
from ..kernels._static import concrete, constant_result
from ._cache import Cache, Place
from ._contract import API_VERSION, READY, ArrayState, Backend, Status
from ._features import FEATURES, Feature, Finding, feature_of, features_of

__all__ = [
    "API_VERSION",
    "FEATURES",
    "READY",
    "THREEFRY",
    "AlibiBias",
    "ArgumentError",
    "Array",
    "ArrayState",
    "AttentionGrads",
    "Backend",
    "BackendMismatchError",
    "BackendUnavailableError",
    "BlockMask",
    "BothMasks",
    "Cache",
    "DTypeError",
    "Feature",
    "Finding",
    "Kernel",
    "KernelUnsupportedError",
    "Place",
    "PolyattnError",
    "PrefixMask",
    "Problem",
    "Record",
    "RelativePositionBias",
    "RowStatistics",
    "Scope",
    "ShapeError",
    "Sizes",
    "Status",
    "Structure",
    "StructuredBias",
    "StructuredMask",
    "Tangents",
    "TiledKernel",
    "allowed_in",
    "attention_backward_vjp",
    "attention_tangents",
    "concrete",
    "constant_result",
    "dtype_name",
    "expand",
    "feature_of",
    "features_of",
    "flatten",
    "in_tiles_of",
    "silenced",
    "statistics_of_lse",
    "unbroadcast",
]
