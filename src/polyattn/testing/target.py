"""The target of the checks: a backend by its plugin, or a bare array API namespace."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import polyattn as pa

from .. import registry
from ..backend import Array, Backend, dtype_name
from ..conversion import checked_device
from ..kernels import FLOAT_DTYPES

__all__ = ["Target", "open_backend", "open_namespace"]


@dataclass(frozen=True)
class Target:
    """A library under test. ``contract`` is its plugin, or None for a bare namespace."""

    name: str
    version: str
    xp: Any
    contract: Backend | None
    device: str | None = None

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The floating dtypes that the library supports on this machine."""
        return tuple(name for name in FLOAT_DTYPES if self._dtype(name) is not None)

    @property
    def expected_failures(self) -> dict[str, str]:
        """The failures that the plugin declares, with reasons."""
        return dict(getattr(self.contract, "expected_failures", {}))

    def make(self, array: ArrayLike, dtype: str = "float64") -> Array:
        """Return an array of the library, converted from float32 if NumPy lacks the dtype."""
        native = self._dtype(dtype)
        if native is None:
            raise pa.DTypeError(f"{self.name} has no dtype {dtype!r}")
        carried = "float32" if dtype == "bfloat16" else dtype
        host = np.array(array, dtype=carried, order="C")
        x = pa.to_backend(host, self.name, self.device) if self.contract is not None else self.xp.asarray(host)
        return x if carried == dtype else self.xp.astype(x, native)

    def to_np(self, x: Array) -> NDArray[Any]:
        """Return an array of the library on the host; 16-bit floats as float32."""
        if dtype_name(x.dtype) in ("float16", "bfloat16"):
            x = self.xp.astype(x, self._dtype("float32"))
        if self.contract is not None:
            return np.array(self.contract.to_numpy(x))
        return np.array(np.from_dlpack(x) if hasattr(x, "__dlpack__") else x)

    def owns(self, x: object) -> bool:
        """Say whether ``x`` is an array of the library."""
        if self.contract is not None:
            return self.contract.owns(x)
        # The namespace of an array may differ from the target's, which array_api_compat wraps; some arrays have none.
        return getattr(x, "__array_namespace__", lambda: None)() is self.xp or type(x) is type(self.xp.asarray([0.0]))

    def _dtype(self, name: str) -> Any:
        if self.contract is None:
            return getattr(self.xp, name, None)
        try:
            return self.contract.dtype(name)
        except pa.DTypeError:
            return None


def open_backend(name: str, device: str | None = None) -> Target:
    """Return the target for a backend on one of its devices, by default the first.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If there is no such backend or device, or it cannot be used.
    """
    backend = registry.ready(name)
    device = checked_device(backend, device)
    if backend.name == "jax":
        # The library never changes JAX's settings, but the float64 checks need 64-bit JAX.
        importlib.import_module("jax").config.update("jax_enable_x64", True)
    return Target(backend.name, backend.status().version, backend.namespace(), backend, device)


def open_namespace(module: str) -> Target:
    """Return the target for a module that is an array API namespace; raise ImportError if it cannot be imported."""
    xp = importlib.import_module(module)
    array = xp.asarray([0.0])
    package, home = (name.partition(".")[0] for name in (module, type(array).__module__))
    # The library is that of the arrays: torch for array_api_compat.torch; for jax.numpy with jaxlib's arrays it is jax.
    libraries = (xp, sys.modules[package]) if home.startswith(package) else (sys.modules[home],)
    version = next((str(library.__version__) for library in libraries if hasattr(library, "__version__")), "")
    if hasattr(array, "__array_namespace__"):
        # Use the namespace of the arrays; a wrapper of it is a different object.
        xp = array.__array_namespace__()
    return Target(module, version, xp, None)
