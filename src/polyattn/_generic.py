"""Backends for libraries without a plugin, through ``__array_namespace__`` or DLPack alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from .backend import Array, Backend, BackendMismatchError, Status

__all__ = ["Exporter", "GenericBackend", "namespace_of"]

# Functions that an object must have to be accepted as an array API namespace.
FUNCTIONS = ("asarray", "astype", "matmul", "reshape", "sum")


class GenericBackend(Backend):
    """A library whose arrays have ``__array_namespace__``; only the array API standard is used."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        self.name = getattr(namespace, "__name__", type(namespace).__name__)
        self.array_modules = (self.name.partition(".")[0],)

    def status(self) -> Status:
        """Return "ready": an array of the library exists."""
        return Status("ready", version=str(getattr(self._namespace, "__version__", "")))

    def namespace(self) -> Any:
        """Return the namespace that the arrays returned."""
        return self._namespace

    def owns(self, x: object) -> bool:
        """Return whether ``x`` has the same namespace."""
        return getattr(x, "__array_namespace__", lambda: None)() is self._namespace

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Import through DLPack if the library can, then move to the device."""
        xp: Any = self._namespace
        if self.owns(x):
            y = xp.asarray(x, copy=copy)
        elif hasattr(xp, "from_dlpack"):
            y = xp.from_dlpack(x) if copy is None else xp.from_dlpack(x, copy=copy)  # copy= since 2023.12
        else:
            y = xp.asarray(x, copy=copy)
        if device is None or self.device_of(y) == device:
            return y
        if copy is False:
            raise ValueError(f"an array on {self.device_of(y)} cannot reach {device} without a copy")
        return y.to_device(self.native_device(device))

    def device_of(self, x: Array) -> str:
        """Return the library's name of the device."""
        return str(getattr(x, "device", "cpu"))

    def native_device(self, device: str | None) -> Any:
        """Return the device of that name; without the inspection API only the default is known."""
        info = getattr(self._namespace, "__array_namespace_info__", None)
        return next((d for d in (info().devices() if info else ()) if str(d) == device), None)

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Export through DLPack, or through ``__array__`` if the library has no DLPack."""
        try:
            view = np.asarray(np.from_dlpack(x) if hasattr(x, "__dlpack__") else x)
            if view.dtype == object:  # NumPy could not convert the object
                raise TypeError("it has neither __dlpack__ nor __array__")
            return view
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise BackendMismatchError(
                f"{self.name} has no plugin, and its array on {self.device_of(x)} cannot be exchanged with other "
                f"libraries ({type(error).__name__}: {error})"
            ) from error


class Exporter(Backend):
    """The library of an object with ``__dlpack__`` and no namespace: it can be converted, not computed with."""

    # DLPack's device types by polyattn's device names; pinned host memory counts as the host.
    DEVICES: ClassVar[Mapping[int, str]] = {1: "cpu", 2: "cuda", 3: "cpu", 8: "mps"}

    def __init__(self, x: Any) -> None:
        self.name = f"{type(x).__module__}.{type(x).__qualname__}"
        with self.exchange():
            kind, index = x.__dlpack_device__()
            kind = self.DEVICES.get(int(kind), f"DLPack device {int(kind)}")
        self.device = kind if kind == "cpu" else f"{kind}:{index}"

    def shares(self, x: Array) -> bool:
        """Return whether it is on the host."""
        return self.device == "cpu"

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Return a NumPy view of it, or a copy if it is not on the host; a NumPy array is returned as it is."""
        if isinstance(x, np.ndarray):
            return x
        with self.exchange():
            return np.from_dlpack(x) if self.device == "cpu" else np.from_dlpack(x, device="cpu")

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Raise BackendMismatchError for any error of the two libraries during the exchange."""
        try:
            yield
        except Exception as error:
            raise BackendMismatchError(
                f"this {self.name} cannot be imported through DLPack ({type(error).__name__}: {error})"
            ) from error


def namespace_of(x: object) -> Any:
    """Return an array's namespace, or None if it has none or the object does not look like a namespace."""
    try:
        namespace = x.__array_namespace__()  # type: ignore[attr-defined]  # tested here
        return namespace if all(hasattr(namespace, name) for name in FUNCTIONS) else None
    except Exception:
        return None
