"""Which backends there are, and which of them owns an array.

Backends are found by their entry points and loaded when first used. A plugin
that cannot be loaded is remembered as broken, with its cause, and disturbs
nobody else.
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


class _Registry:
    """The plugins of this process by canonical name, and the types of arrays that were met."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.plugins: dict[str, Plugin] | None = None
        self.owners: dict[type, str] = {}
        self.backends: dict[str, Backend] = {}  # by the keys that owners has; all that there were
        self.generic: dict[int, Backend] = {}  # by the identity of the namespace, which the backend keeps alive
        self.ready: dict[str, Backend] = {}

    def discover(self) -> dict[str, Plugin]:
        with self.lock:
            if self.plugins is None:
                self.plugins = discover()
            return self.plugins


_registry = _Registry()


def refresh() -> None:
    """Forget what was discovered, so that plugins installed since are found. Running calls keep their backends."""
    importlib.invalidate_caches()
    with _registry.lock:
        _registry.plugins = None
        _registry.owners = {}
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
    """Return the backend that owns an array; the generic one where only the standard is known of it.

    Raises
    ------
    BackendMismatchError
        If ``x`` is no array of a known library and has no ``__array_namespace__``.
    BackendUnavailableError
        If the plugin of its library is broken.
    """
    key = _owner_of(type(x))
    return _registry.backends[_met(type(x), _find_owner(x, argument)) if key is None else key]


@constant_result
def _owner_of(kind: type) -> str | None:
    """Return the key of the backend that owns arrays of a type, where that is known: met before, or a library's own.

    torch.compile calls this, and traces neither the table of types nor the import of a plugin.
    """
    key = _registry.owners.get(kind)
    return _namesake_of(kind) if key is None else key


def looks_like_array(x: object) -> bool:
    """Say whether ``x`` has a dtype and a shape, as every array has."""
    try:
        return hasattr(x, "dtype") and hasattr(x, "shape")
    except Exception:  # a property that raises
        return False


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
    if status.state == "ready":
        try:
            devices = tuple(backend.devices())
        except Exception as cause:
            status = Status("unavailable", status.version, f"its devices() raised {type(cause).__name__}: {cause}")
    return BackendInfo(
        plugin.name, plugin.distribution, status.version, status.state, status.reason, devices, status.install
    )


def _find_owner(x: Array, argument: str) -> Backend:
    if not looks_like_array(x):
        raise BackendMismatchError(f"{argument}: expected an array, got {type(x).__name__}")
    # The plugin named like the array's own package is asked first, then those that are loaded. Others are loaded,
    # which may take its time, only for an array that none of these knows; jax before them for an array of jaxlib.
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
        except BackendUnavailableError:  # a broken plugin owns nothing; selecting it by name says why
            continue
    namespace = namespace_of(x)
    if namespace is not None and _takes(namespace, x):
        return _registry.generic.setdefault(id(namespace), GenericBackend(namespace))
    raise BackendMismatchError(
        f"{argument}: expected an array of a known library, or one with a true __array_namespace__, "
        f"got {type(x).__module__}.{type(x).__qualname__}"
    )


def _namesake_of(kind: type) -> str | None:
    """Return the key of the backend that is named like the package of a type, if it makes arrays of that type."""
    plugin = _registry.discover().get(_package(kind))
    if plugin is None:
        return None
    backend = plugin.load()
    try:
        own = issubclass(kind, type(backend.namespace().empty((0,))))
    except Exception:  # the library cannot be used
        return None
    return _met(kind, backend) if own else None


def _met(kind: type, backend: Backend) -> str:
    """Record who owns arrays of a type, and return the key of the backend."""
    key = str(id(backend))
    _registry.backends[key] = backend
    _registry.owners[kind] = key
    return key


def _package(kind: type) -> str:
    """Return the top-level package of a type, spelt as the name of a backend."""
    return canonical(kind.__module__.partition(".")[0])


def _owns(backend: Backend, x: object) -> bool:
    try:
        return any(module in sys.modules for module in backend.array_modules) and backend.owns(x)
    except Exception:
        return False


def _takes(namespace: Any, x: object) -> bool:
    """Say whether a namespace takes an array as its own: a plugin's library would make another array of it."""
    try:
        made = namespace.asarray(x)
    except Exception:
        return False
    return not any(plugin.loaded and _owns(plugin.load(), made) for plugin in _registry.discover().values())
