"""Selection of the backend that computes: by the user, else the library of the inputs.

In the order of precedence: ``backend=`` of a call or a layer, ``with use_backend(...)``,
``set_backend(...)``, the environment variables ``POLYATTN_BACKEND`` and ``POLYATTN_DEVICE``,
none. Backend and device come from the same level.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from . import registry
from ._scopes import entered
from .backend import Place
from .conversion import checked_device
from .errors import BackendUnavailableError, UnknownBackendError
from .kernels._static import constant_result

__all__ = ["Bound", "Selection", "bound", "get_backend", "selected", "set_backend", "use_backend"]

BACKEND_VARIABLE = "POLYATTN_BACKEND"
DEVICE_VARIABLE = "POLYATTN_DEVICE"


class Selection(NamedTuple):
    """A selected backend, its device (None: the inputs' device if possible), and the source of the selection."""

    backend: str
    device: str | None
    source: str


class Bound(NamedTuple):
    """The place to which a layer or a key-value cache is bound, and whether it moves inputs from other places."""

    place: Place
    moves_inputs: bool


class _Default:
    """The process-wide selection of :func:`set_backend`, the same for every thread."""

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
        A backend of :func:`list_backends`; case is ignored, and ``-`` equals ``_``.
    device : str, optional
        A device of that backend. None is the inputs' device if the backend can address it, else its default.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        On entry to the block, if there is no such backend or device, or it cannot be used.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> with pa.use_backend("numpy"):
    ...     pa.get_backend()
    Selection(backend='numpy', device=None, source='use_backend')
    """
    yield from entered(_scopes, _checked(name, device, "use_backend"))


def set_backend(name: str | None, device: str | None = None) -> None:
    """Select a backend for all threads of the process; None removes the selection.

    A ``use_backend`` block and a ``backend=`` argument take precedence over it; it takes precedence over the
    environment variables.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If there is no such backend or device, or it cannot be used; the selection does not change then.
    """
    if name is None and device is not None:
        raise UnknownBackendError(f"device: {device!r} was given without a backend; name the backend too")
    selection = None if name is None else _checked(name, device, "set_backend")
    with _default.lock:
        _default.selection = selection


def get_backend() -> Selection | None:
    """Return the current selection, or None if the library of the inputs computes.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If an environment variable names a backend or device that does not exist or cannot be used.
    """
    return selected()


@constant_result
def selected(backend: str | None = None, device: str | None = None) -> Selection | None:
    """Return the first selection of: arguments, innermost scope, process default, environment variables; else None."""
    if backend is not None:
        return _checked(backend, device, "backend=")
    if device is not None:
        raise UnknownBackendError(f"device: {device!r} was given without a backend; name the backend too")
    scopes = _scopes.get()
    if scopes or _default.selection:
        return scopes[-1] if scopes else _default.selection
    return _from_environment()


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
    """Return the binding of a new layer or key-value cache: the selection, else NumPy without moving inputs."""
    selection = selected(backend, device)
    chosen = registry.ready("numpy" if selection is None else selection.backend)
    return Bound(Place(chosen, (selection.device if selection else None) or chosen.devices()[0]), selection is not None)
