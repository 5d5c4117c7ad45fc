"""polyattn: exact attention for any array library, with hand-written backward passes.

You get back what you passed in; the backend that you selected is where it is
computed; nothing moves behind your back.

Examples
--------
>>> import numpy as np
>>> import polyattn as pa
>>> q, k, v = (np.random.default_rng(i).standard_normal((2, 8, 16, 64)) for i in range(3))
>>> out, cache = pa.attention_forward(q, k, v, causal=True)
>>> grads = pa.attention_backward(np.ones_like(out), cache)
>>> out.shape, grads.k.shape
((2, 8, 16, 64), (2, 8, 16, 64))
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from ._version import __version__

if _typing.TYPE_CHECKING:
    from . import functional, optim
    from .account import transfers
    from .conversion import to_backend
    from .errors import (
        ArgumentError,
        BackendMismatchError,
        BackendUnavailableError,
        CheckpointError,
        DTypeError,
        EngineError,
        KernelUnsupportedError,
        PolyattnError,
        ShapeError,
        UnknownBackendError,
    )
    from .functional import (
        RowStatistics,
        alibi_bias,
        attention,
        attention_backward,
        attention_backward_vjp,
        attention_forward,
        attention_jvp,
        attention_merge,
        attention_weights,
        block_mask,
        explain,
        prefix_mask,
        relative_position_bias,
    )
    from .kv_cache import KVCache, PagedKVCache, SlidingKVCache
    from .layers import (
        Embedding,
        FeedForward,
        LayerNorm,
        MultiHeadAttention,
        Projection,
        RMSNorm,
        ScaledDotProductAttention,
        TransformerBlock,
    )
    from .registry import list_backends
    from .selection import get_backend, set_backend, use_backend

__all__ = [
    "ArgumentError",
    "BackendMismatchError",
    "BackendUnavailableError",
    "CheckpointError",
    "DTypeError",
    "Embedding",
    "EngineError",
    "FeedForward",
    "KVCache",
    "KernelUnsupportedError",
    "LayerNorm",
    "MultiHeadAttention",
    "PagedKVCache",
    "PolyattnError",
    "Projection",
    "RMSNorm",
    "RowStatistics",
    "ScaledDotProductAttention",
    "ShapeError",
    "SlidingKVCache",
    "TransformerBlock",
    "UnknownBackendError",
    "__version__",
    "alibi_bias",
    "attention",
    "attention_backward",
    "attention_backward_vjp",
    "attention_forward",
    "attention_jvp",
    "attention_merge",
    "attention_weights",
    "block_mask",
    "explain",
    "functional",
    "get_backend",
    "list_backends",
    "optim",
    "prefix_mask",
    "relative_position_bias",
    "set_backend",
    "to_backend",
    "transfers",
    "use_backend",
]

_MODULES = ("errors", "account", "registry", "selection", "conversion", "functional", "kv_cache", "layers")
"""Where the public names are defined, in the order in which the modules import each other."""


def __getattr__(name: str) -> _typing.Any:
    """Import what is first used: NumPy and the kernels are loaded with the first function, not with the package."""
    if name in __all__:
        for module in _MODULES:
            defined = vars(_importlib.import_module(f".{module}", __name__))
            if name in defined:
                return globals().setdefault(name, defined[name])
    if not name.startswith("_"):
        try:
            return _importlib.import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":  # the module is there, and what it imports is not
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
