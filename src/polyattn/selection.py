"""Which backend computes: the strongest selection in force, or the library of the inputs.

From the strongest: ``backend=`` of a call or a layer, ``with use_backend(...)``,
``set_backend(...)``, the variables ``POLYATTN_BACKEND`` and ``POLYATTN_DEVICE``,
nothing. Backend and device come from the same level.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from . import registry
from .backend import Place
from .conversion import checked_device
from .errors import BackendUnavailableError, UnknownBackendError
from .kernels._static import constant_result

__all__ = ["Bound", "Selection", "bound", "get_backend", "selected", "set_backend", "use_backend"]

BACKEND_VARIABLE = "POLYATTN_BACKEND"
DEVICE_VARIABLE = "POLYATTN_DEVICE"


class Selection(NamedTuple):
    """A backend that was chosen, its device (None: the inputs' own where possible), and what chose it."""

    backend: str
    device: str | None
    source: str


class Bound(NamedTuple):
    """The place to which a layer or a cache is bound, and whether it takes arrays of other places."""

    place: Place
    moves_inputs: bool


class _Default:
    """The process-wide default of :func:`set_backend`, seen by every thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.selection: Selection | None = None


_default = _Default()
_scopes: ContextVar[tuple[Selection, ...]] = ContextVar("polyattn_selections", default=())


@contextmanager
def use_backend(name: str, device: str | None = None) -> Iterator[Selection]:
    """Select a backend inside a ``with`` block, in this thread or asyncio task only.

    Parameters
    ----------
    name : str
        A backend of :func:`list_backends`; case does not matter, and ``-`` equals ``_``.
    device : str, optional
        A device of it. None keeps the inputs' device where the backend can address it, else its default.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        At entry, so that a misspelt name is never met half-way.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> with pa.use_backend("numpy"):
    ...     pa.get_backend()
    Selection(backend='numpy', device=None, source='use_backend')
    """
    selection = _checked(name, device, "use_backend")
    _scopes.set((*_scopes.get(), selection))
    try:
        yield selection
    finally:
        # Not by a token: a generator may be closed in another context, or out of turn, and must take back its own.
        _scopes.set(tuple(scope for scope in _scopes.get() if scope is not selection))


def set_backend(name: str | None, device: str | None = None) -> None:
    """Select a backend for the whole process, all threads included; None takes the selection back.

    A ``use_backend`` block and a ``backend=`` argument are stronger, the environment variables weaker.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If there is no such backend or device, or it cannot be used; the selection is then unchanged.
    """
    if name is None and device is not None:
        raise UnknownBackendError(f"device: {device!r} was given without a backend; name the backend too")
    selection = None if name is None else _checked(name, device, "set_backend")
    with _default.lock:
        _default.selection = selection


def get_backend() -> Selection | None:
    """Return the selection in force here, or None: the library of the inputs computes.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If an environment variable names a backend or device that there is not.
    """
    return selected()


@constant_result
def selected(backend: str | None = None, device: str | None = None) -> Selection | None:
    """Return the strongest selection: an argument, the scope, the default, the variables, or None."""
    if backend is not None:
        return _checked(backend, device, "backend=")
    if device is not None:
        raise UnknownBackendError(f"device: {device!r} was given without a backend; name the backend too")
    scopes = _scopes.get()
    if scopes or _default.selection:
        return scopes[-1] if scopes else _default.selection
    return _from_environment() if BACKEND_VARIABLE in os.environ or DEVICE_VARIABLE in os.environ else None


def _checked(name: str, device: str | None, source: str) -> Selection:
    backend = registry.ready(name)
    return Selection(backend.name, checked_device(backend, device), source)


def _from_environment() -> Selection | None:
    name, device = os.environ.get(BACKEND_VARIABLE), os.environ.get(DEVICE_VARIABLE)
    if not name:
        if device:
            raise UnknownBackendError(
                f"{DEVICE_VARIABLE}={device} is set without {BACKEND_VARIABLE}; set both, or unset it"
            )
        return None
    try:
        return _checked(name, device or None, BACKEND_VARIABLE)
    except (UnknownBackendError, BackendUnavailableError) as error:
        raise type(error)(
            f"{BACKEND_VARIABLE}={name}{f' {DEVICE_VARIABLE}={device}' if device else ''}: {error}"
        ) from error


def bound(backend: str | None, device: str | None) -> Bound:
    """Return where a layer or a cache is made: by argument or selection, else on NumPy, where it takes only NumPy's."""
    selection = selected(backend, device)
    chosen = registry.ready("numpy" if selection is None else selection.backend)
    return Bound(Place(chosen, (selection.device if selection else None) or chosen.devices()[0]), selection is not None)
