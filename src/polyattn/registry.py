"""Which backends there are, and which of them owns an array.

Backends are found by their entry points and loaded when first used. A plugin
that cannot be loaded is remembered as broken, with its cause, and disturbs
nobody else.
"""

from __future__ import annotations

import difflib
import re
import threading
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from .backend import API_VERSION, Array, Backend, Status
from .errors import BackendMismatchError, BackendUnavailableError, UnknownBackendError

__all__ = ["BackendInfo", "known", "list_backends", "load", "names", "owner", "ready", "refresh", "same_name"]

GROUP = "polyattn.backends"


@dataclass(frozen=True)
class BackendInfo:
    """What :func:`list_backends` reports of one backend."""

    name: str
    distribution: str
    version: str
    state: str
    reason: str
    devices: tuple[str, ...]
    install: str


class _Plugin:
    """One entry point: loaded at most once, by whichever thread comes first."""

    def __init__(self, entry: metadata.EntryPoint, rivals: tuple[str, ...] = ()) -> None:
        self.name = entry.name
        self.distribution = _distribution(entry)
        self._entry = entry
        self._rivals = rivals
        self._lock = threading.RLock()
        self._backend: Backend | None = None
        self._cause: BaseException | None = None

    def load(self) -> Backend:
        """Return the backend object, or raise BackendUnavailableError with plugin, distribution and cause."""
        with self._lock:
            if self._backend is None and self._cause is None:
                try:
                    self._backend = self._resolve()
                except Exception as cause:
                    self._cause = cause
            if self._backend is None:
                reason = self._cause
                raise BackendUnavailableError(
                    f"backend {self.name!r} (plugin {self._entry.value} of the distribution {self.distribution}) is "
                    f"broken: {type(reason).__name__}: {reason}"
                ) from reason
            return self._backend

    def _resolve(self) -> Backend:
        if self._rivals:
            raise RuntimeError(
                f"more than one distribution provides a backend of this name: {', '.join(self._rivals)}; uninstall one"
            )
        backend = self._entry.load()
        if not isinstance(backend, Backend):
            raise TypeError(f"{self._entry.value} is not an instance of polyattn.backend.Backend but {backend!r}")
        if backend.api_version != API_VERSION:
            raise RuntimeError(
                f"it implements version {backend.api_version} of the backend contract, this polyattn version "
                f"{API_VERSION}; install matching versions of {self.distribution} and polyattn"
            )
        if not same_name(backend.name, self.name):
            raise RuntimeError(f"its object calls itself {backend.name!r}, its entry point {self.name!r}")
        return backend

    @property
    def broken(self) -> bool:
        return self._cause is not None


class _Registry:
    """The plugins of this process by canonical name, and the types of arrays that were met."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.plugins: dict[str, _Plugin] | None = None
        self.owners: dict[type, Backend] = {}
        self.generic: dict[int, Backend] = {}  # by the identity of the namespace, which the backend keeps alive
        self.ready: dict[str, Backend] = {}

    def discover(self) -> dict[str, _Plugin]:
        with self.lock:
            if self.plugins is None:
                found: dict[str, dict[tuple[str, str], metadata.EntryPoint]] = {}
                for entry in metadata.entry_points(group=GROUP):
                    # An editable install can show the same distribution twice: the same value from it is one plugin.
                    found.setdefault(_canonical(entry.name), {})[_distribution(entry), entry.value] = entry
                self.plugins = {
                    name: _Plugin(next(iter(rivals.values())), _labels(rivals) if len(rivals) > 1 else ())
                    for name, rivals in found.items()
                }
            return self.plugins


_registry = _Registry()


def refresh() -> None:
    """Forget what was discovered, so that plugins installed since are found. Running calls keep their backends."""
    with _registry.lock:
        _registry.plugins = None
        _registry.owners = {}
        _registry.generic = {}
        _registry.ready = {}


def names() -> tuple[str, ...]:
    """Return the names of all installed plugins, usable or not, without loading any."""
    return tuple(sorted(plugin.name for plugin in _registry.discover().values()))


def known(name: str) -> str:
    """Return a backend's name as its plugin spells it.

    Raises
    ------
    UnknownBackendError
        If no plugin has that name; the message lists the names and the closest.
    """
    return _plugin(name).name


def load(name: str) -> Backend:
    """Return the backend of that name, loading its plugin; its library need not be usable.

    Raises
    ------
    UnknownBackendError
        If no plugin has that name; the message lists the names and the closest.
    BackendUnavailableError
        If the plugin is broken; the message names it, its distribution and the cause.
    """
    return _plugin(name).load()


def ready(name: str) -> Backend:
    """Return the backend of that name, usable.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        As :func:`load`, and where the library is missing or cannot be used: with the cause and the install command.
    """
    backend = _registry.ready.get(name)
    if backend is None:
        backend = load(name)
        status = _status(backend)
        if status.state != "ready":
            remedy = f"; install it with: {status.install}" if status.install else ""
            raise BackendUnavailableError(f"backend {backend.name!r} is {status.state}: {status.reason}{remedy}")
        _registry.ready[name] = backend
    return backend


def owner(x: Array, argument: str = "x") -> Backend:
    """Return the backend that owns an array; the generic one where only the standard is known of it.

    Raises
    ------
    BackendMismatchError
        If ``x`` is no array of a known library and has no ``__array_namespace__``.
    """
    backend = _registry.owners.get(type(x))
    if backend is None:
        backend = _find_owner(x, argument)
        _registry.owners[type(x)] = backend
    return backend


def list_backends() -> list[BackendInfo]:
    """Report every backend: name, distribution, version, state (and why), devices, how to install what is missing.

    Loads every plugin, and lets each look for its library.

    Examples
    --------
    >>> import polyattn as pa
    >>> [(b.name, b.state) for b in pa.list_backends() if b.name == "numpy"]
    [('numpy', 'ready')]
    """
    return [_info(plugin) for _, plugin in sorted(_registry.discover().items())]


def same_name(a: str, b: str) -> bool:
    """Compare two backend names as polyattn does: without case, with ``-`` equal to ``_``."""
    return _canonical(a) == _canonical(b)


class GenericBackend(Backend):
    """A library without a plugin whose arrays have ``__array_namespace__``: only the standard is used."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace
        self.name = namespace.__name__
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
        """Import through DLPack."""
        if self.owns(x):
            return self._namespace.asarray(x, copy=copy)
        return self._namespace.from_dlpack(x, copy=copy)

    def device_of(self, x: Array) -> str:
        """Return the library's own spelling of the device."""
        return str(getattr(x, "device", "cpu"))

    def native_device(self, device: str | None) -> Any:
        """Find the device that is spelt so; without an inspection API only the default is known."""
        info = getattr(self._namespace, "__array_namespace_info__", None)
        return next((d for d in (info().devices() if info else ()) if str(d) == device), None)

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Export through DLPack, or, for a library that has none, through ``__array__``."""
        return np.asarray(np.from_dlpack(x)) if hasattr(x, "__dlpack__") else np.asarray(x)


def _canonical(name: str) -> str:
    return re.sub(r"[-_]+", "-", name).strip().casefold()


def _distribution(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "an unknown distribution"


def _labels(rivals: dict[tuple[str, str], metadata.EntryPoint]) -> tuple[str, ...]:
    return tuple(f"{distribution} ({value})" for distribution, value in rivals)


def _plugin(name: str) -> _Plugin:
    if not isinstance(name, str):
        raise UnknownBackendError(f"backend: expected the name of a backend, got {name!r}")
    plugins = _registry.discover()
    plugin = plugins.get(_canonical(name))
    if plugin is None:
        close = difflib.get_close_matches(_canonical(name), plugins, n=1)
        hint = f" Did you mean {plugins[close[0]].name!r}?" if close else ""
        raise UnknownBackendError(f"backend: no backend is called {name!r}; there are {', '.join(names())}.{hint}")
    return plugin


def _status(backend: Backend) -> Status:
    try:
        return backend.status()
    except Exception as cause:
        return Status("unavailable", reason=f"its status() raised {type(cause).__name__}: {cause}")


def _info(plugin: _Plugin) -> BackendInfo:
    try:
        backend = plugin.load()
    except BackendUnavailableError as error:
        return BackendInfo(plugin.name, plugin.distribution, "", "broken", str(error), (), "")
    status = _status(backend)
    devices: tuple[str, ...] = ()
    if status.state == "ready":
        try:
            devices = tuple(backend.devices())
        except Exception as cause:
            status = Status("unavailable", status.version, f"its devices() raised {type(cause).__name__}: {cause}")
    return BackendInfo(
        plugin.name, plugin.distribution, status.version, status.state, status.reason, devices, status.install
    )


def _find_owner(x: Array, argument: str) -> Backend:
    # The plugin named like the array's own package is asked first, so that no other is loaded needlessly.
    hint = _canonical(type(x).__module__.partition(".")[0])
    plugins = _registry.discover()
    for _, plugin in sorted(plugins.items(), key=lambda item: item[0] != hint):
        if plugin.broken:
            continue
        try:
            backend = plugin.load()
            if backend.imported() and backend.owns(x):
                return backend
        except Exception:  # a broken plugin owns nothing; selecting it by name says why
            continue
    if hasattr(x, "__array_namespace__"):
        namespace = x.__array_namespace__()
        return _registry.generic.setdefault(id(namespace), GenericBackend(namespace))
    raise BackendMismatchError(
        f"{argument}: expected an array of a known library, or one with __array_namespace__, got {type(x).__name__}"
    )
