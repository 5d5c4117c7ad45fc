"""The features in which array libraries differ: the table for the skips of tests, the command line and the docs.

Features are detected if possible: whether a plugin overrides the hook that a feature needs, whether the library has a
dtype or shares memory. A plugin declares other missing features, and better reasons, in ``lacks``. The conformance kit
detects every feature that it can, and compares the result with this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import DTypeError
from ..kernels import Array
from ._contract import Backend

__all__ = ["FEATURES", "Feature", "Finding", "feature_of", "features_of"]

Probe = Callable[[Backend], str | None]
"""Tests a backend for a feature, and returns None if it has it, else the reason."""


@dataclass(frozen=True)
class Feature:
    """A feature that not every library has.

    ``hook`` is the member of :class:`Backend` that a plugin overrides for it, if there is one; then it decides. ``ask``
    tests the library itself, if it can be used; with a hook, its answer must agree.
    """

    name: str
    meaning: str
    hook: str | None = None
    ask: Probe | None = None


class Finding(NamedTuple):
    """Whether a library has a feature, and if not, why; ``present`` is None if the library could not be tested."""

    present: bool | None
    reason: str = ""


def feature_of(backend: Backend, name: str, *, ready: bool = True) -> Finding:
    """Return the finding for one of the :data:`FEATURES`; ``ready`` is whether the library can be tested."""
    feature = FEATURES[name]
    if name in backend.lacks:
        return Finding(False, backend.lacks[name])
    if feature.hook is not None:
        given = overrides(backend, feature.hook)
        return Finding(given, "" if given else f"its plugin does not override Backend.{feature.hook}")
    if feature.ask is None:
        return Finding(True)
    if not ready:
        return Finding(None, "this needs a test of the library, which cannot be used here")
    reason = feature.ask(backend)
    return Finding(reason is None, reason or "")


def features_of(backend: Backend, *, ready: bool = True) -> dict[str, Finding]:
    """Return the findings for all features; an exception in a test is the reason of its finding."""
    found = {}
    for name in FEATURES:
        try:
            found[name] = feature_of(backend, name, ready=ready)
        except Exception as error:
            found[name] = Finding(None, f"the test for it raised {type(error).__name__}: {error}")
    return found


def overrides(backend: Backend, hook: str) -> bool:
    """Return whether a plugin overrides a member of :class:`Backend`."""
    return getattr(type(backend), hook) is not getattr(Backend, hook)


# ---- tests of a library --------------------------------------------------------------------------------------------


def has_dtype(name: str) -> Probe:
    """Return a test for a dtype."""

    def ask(backend: Backend) -> str | None:
        try:
            backend.dtype(name)
        except DTypeError as error:
            return str(error)
        return None

    return ask


def sample(backend: Backend) -> Array:
    """Return a small array, on the host if the library can address it."""
    elsewhere = "cpu" in backend.devices()[1:]  # by default its arrays are on an accelerator
    return backend.asarray(np.zeros(4, np.float32), "cpu" if elsewhere else None)


def shares_memory(backend: Backend) -> str | None:
    """Convert NumPy arrays that start at different multiples of 16 bytes, as NumPy's may."""
    memory = np.zeros(64, np.float32)
    for start in range(0, 32, 4):
        x = memory[start : start + 4]
        there = backend.asarray(x, None) if backend.shares(x) else None
        if there is None or not (backend.shares(there) and np.shares_memory(backend.to_numpy(there), x)):
            return "a NumPy array is copied"
    return None


def exports(backend: Backend) -> str | None:
    """Export an array as a DLPack capsule."""
    try:
        sample(backend).__dlpack__()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def writes_in_place(backend: Backend) -> str | None:
    """Write into an array, and check whether the result is the same array."""
    xp, x = backend.namespace(), sample(backend)
    return None if backend.update_slice(x, xp.ones_like(x[:1]), 0, 0) is x else "arrays are not modified in place"


def shows_values(backend: Backend) -> str | None:
    """Check whether the values of an array may be read."""
    return None if backend.state(sample(backend)).readable else "its values are not read"


def compiles(backend: Backend) -> str | None:
    """Compile a function, and check whether the result is another one."""
    return "a function is returned as it is" if backend.jit(compiles) is compiles else None


def loops(backend: Backend) -> str | None:
    """Count the calls of the body of a loop."""
    calls = []

    def body(carry: Array, index: object) -> tuple[Array, tuple[()]]:
        calls.append(index)
        return carry, ()

    backend.scan(body, sample(backend), 8)
    return "the body of a loop is called for each step" if len(calls) >= 8 else None


def hooked(hook: str) -> Probe:
    """Return a test for a hook, which finds a plugin that overrides it and declares the feature lacking."""
    return lambda backend: None if overrides(backend, hook) else f"Backend.{hook} is not overridden"


FEATURES: Mapping[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("float64", "arrays of float64", ask=has_dtype("float64")),
        Feature("float16", "arrays of float16; long sums are in float32", ask=has_dtype("float16")),
        Feature("bfloat16", "arrays of bfloat16; long sums are in float32", ask=has_dtype("bfloat16")),
        Feature("shared_memory", "a contiguous NumPy array is converted both ways without a copy", ask=shares_memory),
        Feature("dlpack", "other libraries can import its arrays through DLPack", ask=exports),
        Feature("devices", "arrays on devices other than the host", hook="devices"),
        Feature("in_place", "a key-value cache is updated in place", "update_slice", writes_in_place),
        Feature("values", "lengths and indices out of range raise at the call", ask=shows_values),
        Feature("autograd", "its automatic differentiation uses polyattn's backward", "differentiable",
                hooked("differentiable")),
        Feature("second_order", "its automatic differentiation works on gradients, too", "differentiable"),
        Feature("forward_mode", "its forward-mode differentiation works on attention", "differentiable"),
        Feature("vmap", "its vmap works on attention and its gradients", "differentiable"),
        Feature("jit", "it compiles polyattn's functions, with lengths, offsets and seeds traced", "jit", compiles),
        Feature("scan", "the loop over tiles is compiled once, for any number of tiles", "scan", loops),
        Feature("any_shape", "a new shape needs no compilation"),
        Feature("kernels", "attention kernels of its own, before the generic ones", "kernels", hooked("kernels")),
    )
}  # fmt: skip
"""All features by name, in the order of the table."""
