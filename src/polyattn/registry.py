"""The registry of backends, and the backend that owns an array.

Backends are found by their entry points and loaded on first use. A plugin that
cannot be loaded is kept as broken, with the cause, and does not affect others.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import threading
from dataclasses import dataclass
from typing import Any

from ._generic import GenericBackend, namespace_of
from ._plugin import Plugin, canonical, discover
from .backend import Array, Backend, Status
from .errors import BackendMismatchError, BackendUnavailableError, UnknownBackendError
from .kernels._static import constant_result

__all__ = [
    "BackendInfo", "known", "list_backends", "load", "looks_like_array", "names", "owner", "ready", "refresh",
    "same_name",
]  # fmt: skip


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
    notes: tuple[str, ...] = ()


class _Registry:
    """The plugins of this process by canonical name, and the owners of array types seen so far."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.plugins: dict[str, Plugin] | None = None
        self.owners: dict[type, str] = {}
        self.backends: dict[str, Backend] = {}  # by the keys in owners; never emptied
        self.generic: dict[int, Backend] = {}  # by the id of the namespace, which the backend keeps alive
        self.ready: dict[str, Backend] = {}

    def discover(self) -> dict[str, Plugin]:
        with self.lock:
            if self.plugins is None:
                self.plugins = discover()
            return self.plugins


_registry = _Registry()


def refresh() -> None:
    """Discover plugins again, including those installed since. Running calls keep their backends."""
    importlib.invalidate_caches()
    with _registry.lock:
        _registry.plugins = None
        _registry.owners = {}
        _registry.ready = {}


def names() -> tuple[str, ...]:
    """Return the names of all installed plugins, usable or not, without loading them."""
    return tuple(sorted(plugin.name for plugin in _registry.discover().values()))


def known(name: str) -> str:
    """Return a backend's name as its plugin writes it.

    Raises
    ------
    UnknownBackendError
        If no plugin has that name; the message lists all names and suggests the closest.
    """
    return _plugin(name).name


def load(name: str) -> Backend:
    """Load the plugin of that name and return its backend; the array library need not be usable.

    Raises
    ------
    UnknownBackendError
        If no plugin has that name; the message lists all names and suggests the closest.
    BackendUnavailableError
        If the plugin cannot be loaded; the message names it, its distribution and the cause.
    """
    return _plugin(name).load()


def ready(name: str) -> Backend:
    """Return the backend of that name, or raise if it is not usable.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        As :func:`load`, and if the library is missing or cannot be used, with the cause and the install command.
    """
    backend = _registry.ready.get(name) if isinstance(name, str) else None
    if backend is None:
        backend = load(name)
        status = _status(backend)
        if status.state != "ready":
            remedy = f"; install it with: {status.install}" if status.install else ""
            raise BackendUnavailableError(f"backend {backend.name!r} is {status.state}: {status.reason}{remedy}")
        _registry.ready[name] = backend
    return backend


def owner(x: Array, argument: str = "x") -> Backend:
    """Return the backend that owns an array; a generic one if its library has no plugin but a namespace.

    Raises
    ------
    BackendMismatchError
        If ``x`` is no array of a known library and has no ``__array_namespace__``.
    BackendUnavailableError
        If the plugin of its library cannot be loaded.
    """
    key = _owner_of(type(x))
    return _registry.backends[_record_owner(type(x), _find_owner(x, argument)) if key is None else key]


@constant_result
def _owner_of(kind: type) -> str | None:
    """Return the key of the backend that owns arrays of a type, or None if the type alone does not determine it.

    Under torch.compile this is called while tracing; the table of types and the import of a plugin are not traced.
    """
    key = _registry.owners.get(kind)
    return _namesake_of(kind) if key is None else key


def looks_like_array(x: object) -> bool:
    """Return whether ``x`` has a dtype and a shape, as every array has."""
    try:
        return hasattr(x, "dtype") and hasattr(x, "shape")
    except Exception:  # a property that raises
        return False


def list_backends() -> list[BackendInfo]:
    """Return name, distribution, version, state with its reason, devices, install command and notes of every backend.

    This loads every plugin, and each plugin checks its library.

    Examples
    --------
    >>> import polyattn as pa
    >>> [(b.name, b.state) for b in pa.list_backends() if b.name == "numpy"]
    [('numpy', 'ready')]
    """
    return [_info(plugin) for _, plugin in sorted(_registry.discover().items())]


def same_name(a: str, b: str) -> bool:
    """Return whether two backend names are equal, ignoring case, with ``-`` equal to ``_``."""
    return canonical(a) == canonical(b)


def _plugin(name: str) -> Plugin:
    if not isinstance(name, str):
        raise UnknownBackendError(f"backend: expected the name of a backend, got {name!r}")
    plugins = _registry.discover()
    plugin = plugins.get(canonical(name))
    if plugin is None:
        close = difflib.get_close_matches(canonical(name), plugins, n=1)
        hint = f" Did you mean {plugins[close[0]].name!r}?" if close else ""
        raise UnknownBackendError(f"backend: no backend is called {name!r}; there are {', '.join(names())}.{hint}")
    return plugin


def _status(backend: Backend) -> Status:
    try:
        return backend.status()
    except Exception as cause:
        return Status("unavailable", reason=f"its status() raised {type(cause).__name__}: {cause}")


def _info(plugin: Plugin) -> BackendInfo:
    try:
        backend = plugin.load()
    except BackendUnavailableError as error:
        return BackendInfo(plugin.name, plugin.distribution, "", "broken", str(error), (), "")
    status = _status(backend)
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if status.state == "ready":
        try:
            devices = tuple(backend.devices())
            notes = tuple(backend.notes())
        except Exception as cause:
            asked = "notes" if devices else "devices"
            devices = ()
            status = Status("unavailable", status.version, f"its {asked}() raised {type(cause).__name__}: {cause}")
    return BackendInfo(
        plugin.name, plugin.distribution, status.version, status.state, status.reason, devices, status.install, notes
    )


def _find_owner(x: Array, argument: str) -> Backend:
    if not looks_like_array(x):
        raise BackendMismatchError(f"{argument}: expected an array, got {type(x).__name__}")
    # First the plugin with the name of the array's package, then loaded plugins. The others, which may be slow to load,
    # follow only for an array that none of these owns; among them first jax for an array of jaxlib, for instance.
    packages = [_package(kind) for kind in type(x).__mro__]
    plugins = _registry.discover()
    namesake = next((plugins[package] for package in packages if package in plugins), None)
    if namesake is not None and _owns(namesake.load(), x):
        return namesake.load()
    related = {name for name in plugins if any(package.startswith(name) for package in packages)}
    for _, plugin in sorted(plugins.items(), key=lambda item: (not item[1].loaded, item[0] not in related)):
        try:
            if _owns(plugin.load(), x):
                return plugin.load()
        except BackendUnavailableError:  # selecting a broken plugin by name raises the cause
            continue
    namespace = namespace_of(x)
    if namespace is not None and _accepts(namespace, x):
        return _registry.generic.setdefault(id(namespace), GenericBackend(namespace))
    raise BackendMismatchError(
        f"{argument}: expected an array of a known library, or one with a valid __array_namespace__, "
        f"got {type(x).__module__}.{type(x).__qualname__}"
    )


def _namesake_of(kind: type) -> str | None:
    """Return the key of the backend with the name of a type's package, if its arrays have that type."""
    plugin = _registry.discover().get(_package(kind))
    if plugin is None:
        return None
    backend = plugin.load()
    try:
        own = issubclass(kind, type(backend.namespace().empty((0,))))
    except Exception:  # the library cannot be used
        return None
    return _record_owner(kind, backend) if own else None


def _record_owner(kind: type, backend: Backend) -> str:
    """Record the backend that owns arrays of a type, and return its key."""
    key = str(id(backend))
    _registry.backends[key] = backend
    _registry.owners[kind] = key
    return key


def _package(kind: type) -> str:
    """Return the top-level package of a type, in the canonical form of backend names."""
    return canonical(kind.__module__.partition(".")[0])


def _owns(backend: Backend, x: object) -> bool:
    try:
        return any(module in sys.modules for module in backend.array_modules) and backend.owns(x)
    except Exception:
        return False


def _accepts(namespace: Any, x: object) -> bool:
    """Return whether a namespace accepts an array, and its ``asarray`` does not return one of a plugin's library."""
    try:
        made = namespace.asarray(x)
    except Exception:
        return False
    return not any(plugin.loaded and _owns(plugin.load(), made) for plugin in _registry.discover().values())
