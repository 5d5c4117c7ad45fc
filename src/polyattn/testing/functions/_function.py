"""An attention function of any library: how to call it, what it offers, and how it is found by name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ArgumentError, BackendUnavailableError
from ._libraries import Library, library_named
from .adapters import ADAPTERS

__all__ = ["ARGUMENTS", "AttentionFunction", "load_function"]

ARGUMENTS = ("mask", "bias", "causal", "scale", "dropout", "window", "key_lengths", "softcap", "sinks")
"""The keyword arguments that a check can pass, with the meaning that :func:`polyattn.attention` documents."""

LAYOUTS = ("bhnd", "bnhd")

# What the same argument is called elsewhere, to call a function for which there is no adapter.
SYNONYMS = {
    "mask": ("mask", "attn_mask", "attention_mask"),
    "bias": ("bias", "attn_bias", "attn_mask"),
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "sm_scale", "softmax_scale"),
    "dropout": ("dropout", "dropout_p", "dropout_rate"),
    "softcap": ("softcap", "logits_soft_cap"),
    "sinks": ("sinks",),
    "window": ("window", "window_size"),
    "key_lengths": ("key_lengths", "key_value_seq_lengths"),
}


@dataclass(frozen=True)
class AttentionFunction:
    """An attention function under test.

    Parameters
    ----------
    name, version : str
        Of the function, and of its library.
    attention : callable
        ``attention(q, k, v, **arguments)`` returns the output. It receives only arguments in ``offers``.
    library : Library
        Makes arrays, and computes gradients if the function has no ``backward``.
    offers : frozenset of str
        Those of :data:`ARGUMENTS` that the function has.
    layout : str
        ``"bhnd"`` for arrays of shape (batch, heads, n, d), or ``"bnhd"`` for (batch, n, heads, d).
    backward : callable, optional
        ``backward(dout, q, k, v, **arguments)`` returns the gradients of q, k, v and, if one is given, the bias.
    dtypes : tuple of str
        The floating dtypes that the function documents.
    declared : mapping of str to str
        Checks that are known not to hold, with the reason.
    """

    name: str
    version: str
    attention: Callable[..., Any]
    library: Library
    offers: frozenset[str]
    layout: str = "bhnd"
    backward: Callable[..., Any] | None = None
    dtypes: tuple[str, ...] = ("float32",)
    declared: Mapping[str, str] = field(default_factory=dict)

    def in_layout(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return (batch, heads, n, d) in the layout of the function, and back."""
        return np.swapaxes(x, 1, 2) if self.layout == "bnhd" else x


def load_function(name: str) -> AttentionFunction:
    """Return the function of a shipped adapter, of an adapter file, or by its dotted name.

    Parameters
    ----------
    name : str
        The name of an adapter (a key of :data:`ADAPTERS`), the path of an adapter file (``.py``), or the dotted name of
        a function, such as ``"torch.nn.functional.scaled_dot_product_attention"``. If polyattn ships an adapter for
        that function, it is used; otherwise the names of the parameters say what they mean.

    Raises
    ------
    ArgumentError
        If there is no such adapter, file or function, or it cannot be called with (q, k, v).
    BackendUnavailableError
        If its library is not installed.
    """
    if name.endswith(".py"):
        return of_module(_from_file(Path(name)), name)
    adapter = next((adapter for adapter, function in ADAPTERS.items() if name in (adapter, function)), None)
    if adapter is not None:
        return of_module(_import(f"{__package__}.adapters.{adapter.replace('-', '_')}"), ADAPTERS[adapter] or adapter)
    if "." not in name:
        known = ", ".join(ADAPTERS)
        raise ArgumentError(f"function: expected an adapter ({known}), a .py file or a dotted name, got {name!r}")
    return _by_signature(name)


def of_module(module: ModuleType, name: str) -> AttentionFunction:
    """Return the function that an adapter module describes; :mod:`polyattn.testing.functions` documents the format."""
    attention = getattr(module, "attention", None)
    if not callable(attention):
        raise ArgumentError(f"function: expected {name} to define attention(q, k, v, *, …), which it does not")
    parameters = inspect.signature(attention).parameters.values()
    offers = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    if unknown := sorted(offers - set(ARGUMENTS)):
        raise ArgumentError(f"function: {name} has the keyword {unknown[0]!r}; expected some of {', '.join(ARGUMENTS)}")
    layout = getattr(module, "LAYOUT", "bhnd")
    if layout not in LAYOUTS:
        raise ArgumentError(f"function: LAYOUT of {name}: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    library = library_named(getattr(module, "ARRAYS", "numpy"), module)
    return AttentionFunction(
        name=name,
        version=getattr(module, "VERSION", library.version),
        attention=attention,
        library=library,
        offers=offers,
        layout=layout,
        backward=getattr(module, "backward", None),
        dtypes=getattr(module, "DTYPES", library.dtypes),
        declared=getattr(module, "DECLARED", {}),
    )


def _by_signature(name: str) -> AttentionFunction:
    """Return a function that has no adapter, called by those parameters whose names are known."""
    path, _, attribute = name.rpartition(".")
    function = getattr(_import(path), attribute, None)
    if not callable(function):
        raise ArgumentError(f"function: expected a function, got {name!r}, which {path} does not have")
    try:
        parameters = inspect.signature(function).parameters
    except ValueError as cause:
        raise ArgumentError(f"function: {name} has no signature to read; write an adapter file for it") from cause
    named = {
        argument: next((other for other in others if other in parameters), None)
        for argument, others in SYNONYMS.items()
    }
    passed = {argument: parameter for argument, parameter in named.items() if parameter is not None}

    def attention(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        return function(q, k, v, **{passed[argument]: x for argument, x in arguments.items()})

    package = name.partition(".")[0]
    library = library_named(package if package in ("torch", "jax", "mlx") else "numpy", sys.modules[path])
    version = getattr(sys.modules[package], "__version__", "")
    return AttentionFunction(name, version, attention, library, frozenset(passed), dtypes=library.dtypes)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ArgumentError(f"function: expected an adapter file, got {str(path)!r}, which does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"function: {str(path)!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as cause:
        raise BackendUnavailableError(f"function: {name} cannot be imported here: {cause}") from cause
