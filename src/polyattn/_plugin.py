"""Installed plugins: found by their entry points, loaded on first use; load errors are kept."""

from __future__ import annotations

import logging
import re
import threading
from importlib import metadata

from .backend import API_VERSION, Backend
from .errors import BackendUnavailableError

__all__ = ["Plugin", "canonical", "discover"]

GROUP = "polyattn.backends"
# The methods of version 1 of the contract that version 2 has not, with their replacements.
OF_VERSION_1 = {
    "takes": "shares(x)", "viewable": "shares(x)",
    "unfit": "state(x).unusable", "pinned": "state(x).captive", "on_host": "state(x).readable",
    "write_entries": "update_slice, whose fallback takes a start for each entry",
    "imported": "array_modules, which is enough",
}  # fmt: skip
logger = logging.getLogger("polyattn")


class Plugin:
    """One entry point, loaded at most once, by the first thread that needs it."""

    def __init__(self, entry: metadata.EntryPoint, duplicates: tuple[str, ...] = ()) -> None:
        self.name = entry.name
        self.distribution = _distribution(entry)
        self._entry = entry
        self._duplicates = duplicates
        self._lock = threading.RLock()
        self._backend: Backend | None = None
        self._cause: BaseException | None = None

    def load(self) -> Backend:
        """Return the backend, or raise BackendUnavailableError with the plugin, the distribution and the cause."""
        with self._lock:
            if self._backend is None and self._cause is None:
                try:
                    self._backend = self._resolve()
                except (Exception, SystemExit) as cause:
                    self._cause = cause
            if self._backend is None:
                reason = self._cause
                raise BackendUnavailableError(
                    f"backend {self.name!r} (plugin {self._entry.value} of the distribution {self.distribution}) is "
                    f"broken: {type(reason).__name__}: {reason}"
                ) from reason
            return self._backend

    def _resolve(self) -> Backend:
        if self._duplicates:
            raise RuntimeError(
                f"more than one distribution provides a backend of this name: {', '.join(self._duplicates)}; "
                "uninstall one"
            )
        backend = self._entry.load()
        if not isinstance(backend, Backend):
            raise TypeError(f"{self._entry.value} is not an instance of polyattn.backend.Backend but {backend!r}")
        replaced = [f"{old} by {new}" for old, new in OF_VERSION_1.items() if hasattr(backend, old)]
        version = 1 if replaced else backend.api_version
        if version != API_VERSION:
            changes = f", or replace {'; '.join(replaced)}" if replaced else ""
            raise RuntimeError(
                f"it implements version {version} of the backend contract, this polyattn has version {API_VERSION}; "
                f"install matching versions of {self.distribution} and polyattn{changes}"
            )
        if canonical(backend.name) != canonical(self.name):
            raise RuntimeError(f"the name of its backend is {backend.name!r}, that of its entry point {self.name!r}")
        return backend

    @property
    def loaded(self) -> bool:
        return self._backend is not None


def discover() -> dict[str, Plugin]:
    """Return the installed plugins by canonical name, without loading any."""
    found: dict[str, dict[tuple[str, str], metadata.EntryPoint]] = {}
    for entry in _entry_points():
        # An editable install can list the same distribution twice: equal entry points count once.
        found.setdefault(canonical(entry.name), {})[_distribution(entry), entry.value] = entry
    return {
        name: Plugin(next(iter(entries.values())), _labels(entries) if len(entries) > 1 else ())
        for name, entries in found.items()
    }


def canonical(name: str) -> str:
    """Return the form in which names are compared: in lower case, with ``-`` for ``_``."""
    return re.sub(r"[-_]+", "-", name).strip().casefold()


def _entry_points() -> list[metadata.EntryPoint]:
    try:
        return list(metadata.entry_points(group=GROUP))
    except Exception:  # one damaged distribution makes the query fail: leave out that one
        found: dict[str, list[metadata.EntryPoint]] = {}
        for distribution in metadata.distributions():
            try:
                if distribution.name not in found:  # the first one on the path is imported
                    found[distribution.name] = list(distribution.entry_points.select(group=GROUP))
            except Exception as cause:
                logger.warning("the entry points of a distribution cannot be read, and are left out: %s", cause)
        return [entry for entries in found.values() for entry in entries]


def _distribution(entry: metadata.EntryPoint) -> str:
    try:
        return entry.dist.name if entry.dist is not None and entry.dist.name else "unknown"
    except Exception:  # its metadata are damaged
        return "unknown"


def _labels(entries: dict[tuple[str, str], metadata.EntryPoint]) -> tuple[str, ...]:
    return tuple(f"{distribution} ({value})" for distribution, value in entries)
