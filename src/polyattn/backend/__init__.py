"""The backend contract: what a plugin implements, and all that it may import.

A plugin is a package with an entry point in the group ``polyattn.backends``
that resolves to an instance of a subclass of :class:`Backend`::

    [project.entry-points."polyattn.backends"]
    mylib = "polyattn_mylib:backend"

Importing the plugin must not import the array library: polyattn loads plugins
to ask them whether they own an array, also where their library is not used.
What a subclass must say is the first half of the class; the hooks of the second
half each have a fallback that uses only the array API standard.

A backend holds no state of its own beyond what its library caches: polyattn
calls it from many threads at once.
"""

from __future__ import annotations

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
    Kernel,
    Problem,
    Record,
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
    "Cache",
    "DTypeError",
    "Feature",
    "Finding",
    "Kernel",
    "KernelUnsupportedError",
    "Place",
    "PolyattnError",
    "Problem",
    "Record",
    "RowStatistics",
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
    "statistics_of_lse",
    "unbroadcast",
]
