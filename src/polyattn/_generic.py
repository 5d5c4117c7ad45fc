"""Libraries without a plugin: known by the namespace that their arrays give, or only by what they export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from .backend import Array, Backend, BackendMismatchError, Status

__all__ = ["Exporter", "GenericBackend", "namespace_of"]

# What an array API namespace has at the least, to tell one from any other object.
FUNCTIONS = ("asarray", "astype", "matmul", "reshape", "sum")


class GenericBackend(Backend):
    """A library whose arrays have ``__array_namespace__``: only the standard is used."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        self.name = getattr(namespace, "__name__", type(namespace).__name__)
        self.array_modules = (self.name.partition(".")[0],)

    def status(self) -> Status:
        """Say that it is ready: its arrays are there."""
        return Status("ready", version=str(getattr(self._namespace, "__version__", "")))

    def namespace(self) -> Any:
        """Return what the arrays gave as their namespace."""
        return self._namespace

    def owns(self, x: object) -> bool:
        """Compare namespaces."""
        return getattr(x, "__array_namespace__", lambda: None)() is self._namespace

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Import through DLPack where the library can, then go to the device."""
        xp: Any = self._namespace
        if self.owns(x):
            y = xp.asarray(x, copy=copy)
        elif hasattr(xp, "from_dlpack"):
            y = xp.from_dlpack(x) if copy is None else xp.from_dlpack(x, copy=copy)  # copy= is of the 2023 standard
        else:
            y = xp.asarray(x, copy=copy)
        if device is None or self.device_of(y) == device:
            return y
        if copy is False:
            raise ValueError(f"an array on {self.device_of(y)} cannot reach {device} without a copy")
        return y.to_device(self.native_device(device))

    def device_of(self, x: Array) -> str:
        """Return the library's own spelling of the device."""
        return str(getattr(x, "device", "cpu"))

    def native_device(self, device: str | None) -> Any:
        """Find the device that is spelt so; without an inspection API only the default is known."""
        info = getattr(self._namespace, "__array_namespace_info__", None)
        return next((d for d in (info().devices() if info else ()) if str(d) == device), None)

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Export through DLPack, or, for a library that has none, through ``__array__``."""
        try:
            view = np.asarray(np.from_dlpack(x) if hasattr(x, "__dlpack__") else x)
            if view.dtype == object:  # what NumPy makes of anything that it does not understand
                raise TypeError("it has neither __dlpack__ nor __array__")
            return view
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise BackendMismatchError(
                f"{self.name} has no plugin, and its array on {self.device_of(x)} cannot be exchanged with other "
                f"libraries ({type(error).__name__}: {error})"
            ) from error


class Exporter(Backend):
    """The library of an object of which nothing is known but ``__dlpack__``: one can take it over, and that is all."""

    # DLPack's numbers of the devices whose names polyattn has; the host's pinned memory is the host's.
    DEVICES: ClassVar[Mapping[int, str]] = {1: "cpu", 2: "cuda", 3: "cpu", 8: "mps"}

    def __init__(self, x: Any) -> None:
        self.name = f"{type(x).__module__}.{type(x).__qualname__}"
        with self.exchange():
            kind, index = x.__dlpack_device__()
            kind = self.DEVICES.get(int(kind), f"DLPack device {int(kind)}")
        self.device = kind if kind == "cpu" else f"{kind}:{index}"

    def shares(self, x: Array) -> bool:
        """Say whether it lies on the host."""
        return self.device == "cpu"

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Return NumPy's view of it, or a copy of what lies elsewhere; a view already taken comes back itself."""
        if isinstance(x, np.ndarray):
            return x
        with self.exchange():
            return np.from_dlpack(x) if self.device == "cpu" else np.from_dlpack(x, device="cpu")

    @contextlib.contextmanager
    def exchange(self) -> Iterator[None]:
        """Say of whatever goes wrong meanwhile, in code that is not ours on either side, what it was about."""
        try:
            yield
        except Exception as error:
            raise BackendMismatchError(
                f"this {self.name} cannot be taken over through DLPack ({type(error).__name__}: {error})"
            ) from error


def namespace_of(x: object) -> Any:
    """Return the namespace that an array gives; None where it gives none, or something that cannot be one."""
    try:
        namespace = x.__array_namespace__()  # type: ignore[attr-defined]  # that is the question
        return namespace if all(hasattr(namespace, name) for name in FUNCTIONS) else None
    except Exception:
        return None
