"""What one library can do and another cannot: the one table behind the tests' skips, the command line and the docs.

What can be asked is asked: the plugin, whether it has a hook that the feature needs; the library, whether it has a
dtype or shares memory. The rest, and better reasons, a plugin says in ``lacks``. The conformance kit asks all that can
be asked and holds it against what is said here.
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

Question = Callable[[Backend], str | None]
"""Asks a backend for a feature, and returns None where it has it, else the reason."""


@dataclass(frozen=True)
class Feature:
    """Something that not every library can do.

    ``hook`` is the member of :class:`Backend` that a plugin gives for it, if it is one's. ``ask`` puts the question to
    a library that can be used; where there is a hook, its answer only has to agree.
    """

    name: str
    meaning: str
    hook: str | None = None
    ask: Question | None = None


class Finding(NamedTuple):
    """Whether a library has a feature, and why not; ``present`` is None where only the library itself could say."""

    present: bool | None
    reason: str = ""


def feature_of(backend: Backend, name: str, *, ready: bool = True) -> Finding:
    """Return what is known of one of the :data:`FEATURES`; ``ready`` says that the library may be asked."""
    feature = FEATURES[name]
    if name in backend.lacks:
        return Finding(False, backend.lacks[name])
    if feature.hook is not None:
        given = gives(backend, feature.hook)
        return Finding(given, "" if given else f"its plugin leaves Backend.{feature.hook} as it is")
    if feature.ask is None:
        return Finding(True)
    if not ready:
        return Finding(None, "only the library itself can say, and it cannot be used here")
    reason = feature.ask(backend)
    return Finding(reason is None, reason or "")


def features_of(backend: Backend, *, ready: bool = True) -> dict[str, Finding]:
    """Return what is known of all features. What goes wrong when a library is asked is its answer."""
    found = {}
    for name in FEATURES:
        try:
            found[name] = feature_of(backend, name, ready=ready)
        except Exception as error:
            found[name] = Finding(None, f"asking for it raised {type(error).__name__}: {error}")
    return found


def gives(backend: Backend, hook: str) -> bool:
    """Say whether a plugin has a member of its own in place of the contract's."""
    return getattr(type(backend), hook) is not getattr(Backend, hook)


# ---- the questions -------------------------------------------------------------------------------------------------


def has_dtype(name: str) -> Question:
    """Return the question whether there is a dtype."""

    def ask(backend: Backend) -> str | None:
        try:
            backend.dtype(name)
        except DTypeError as error:
            return str(error)
        return None

    return ask


def sample(backend: Backend) -> Array:
    """Return a small array, on the host where the library goes there."""
    elsewhere = "cpu" in backend.devices()[1:]  # by default its arrays are on an accelerator
    return backend.asarray(np.zeros(4, np.float32), "cpu" if elsewhere else None)


def shares_memory(backend: Backend) -> str | None:
    """Hand over arrays that begin wherever NumPy's may begin, at any multiple of 16 bytes."""
    memory = np.zeros(64, np.float32)
    for start in range(0, 32, 4):
        x = memory[start : start + 4]
        there = backend.asarray(x, None) if backend.shares(x) else None
        if there is None or not (backend.shares(there) and np.shares_memory(backend.to_numpy(there), x)):
            return "an array of NumPy's is copied"
    return None


def exports(backend: Backend) -> str | None:
    """Ask an array for its DLPack capsule."""
    try:
        sample(backend).__dlpack__()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def writes_in_place(backend: Backend) -> str | None:
    """Write into an array, and see whether the result is that array."""
    xp, x = backend.namespace(), sample(backend)
    return None if backend.update_slice(x, xp.ones_like(x[:1]), 0, 0) is x else "an array is never written to"


def shows_values(backend: Backend) -> str | None:
    """Ask whether an array may be looked at."""
    return None if backend.state(sample(backend)).readable else "its values are not looked at"


def compiles(backend: Backend) -> str | None:
    """Hand over a function, and see whether another comes back."""
    return "a function comes back as it is" if backend.jit(compiles) is compiles else None


def loops(backend: Backend) -> str | None:
    """Count how often the body of a loop is called."""
    calls = []

    def body(carry: Array, index: object) -> tuple[Array, tuple[()]]:
        calls.append(index)
        return carry, ()

    backend.scan(body, sample(backend), 8)
    return "the body of a loop is called for each step" if len(calls) >= 8 else None


def hooked(hook: str) -> Question:
    """Return the question whether the plugin gives a hook: it contradicts a plugin that does and says it lacks it."""
    return lambda backend: None if gives(backend, hook) else f"Backend.{hook} is the contract's"


FEATURES: Mapping[str, Feature] = {
    feature.name: feature
    for feature in (
        Feature("float64", "arrays of float64", ask=has_dtype("float64")),
        Feature("float16", "arrays of float16; long sums are in float32", ask=has_dtype("float16")),
        Feature("bfloat16", "arrays of bfloat16; long sums are in float32", ask=has_dtype("bfloat16")),
        Feature("shared_memory", "a plain NumPy array comes and goes without a copy", ask=shares_memory),
        Feature("dlpack", "other libraries can take its arrays by DLPack", ask=exports),
        Feature("devices", "arrays on other devices than the host", hook="devices"),
        Feature("in_place", "a key-value cache is written where it stands", "update_slice", writes_in_place),
        Feature("values", "lengths and indices out of range are told at the call", ask=shows_values),
        Feature("autograd", "its own differentiation goes through our backward", "differentiable",
                hooked("differentiable")),
        Feature("second_order", "so does its differentiation of a gradient", "differentiable"),
        Feature("forward_mode", "its forward mode goes through attention", "differentiable"),
        Feature("vmap", "its vmap goes through attention and its gradients", "differentiable"),
        Feature("jit", "it compiles our functions, with lengths, offsets and seeds traced", "jit", compiles),
        Feature("scan", "the loop over tiles is one program, however many there are", "scan", loops),
        Feature("any_shape", "a new shape costs no time"),
        Feature("kernels", "attention kernels of its own before the generic one", "kernels", hooked("kernels")),
    )
}  # fmt: skip
"""All features, by name, in the order in which they are told."""
