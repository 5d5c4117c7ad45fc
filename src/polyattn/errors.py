"""What polyattn raises.

Every message names the argument, what was expected and what came, and where
there is a remedy it says what to do. Each class is also the built-in exception
that a caller would expect, so ``except ValueError`` keeps working::

    PolyattnError
    ├── UnknownBackendError      (ValueError)           no backend of that name, or a device without a backend
    ├── BackendUnavailableError  (ImportError)          known, but it cannot be used here
    ├── BackendMismatchError     (TypeError)            arrays of different libraries or devices, or that may not move
    ├── KernelUnsupportedError   (NotImplementedError)  the kernel that was asked for does not do this problem
    ├── ShapeError               (ValueError)           shapes that do not fit
    ├── DTypeError               (TypeError)            element types that do not fit
    ├── ArgumentError            (ValueError)           any other argument with a value that it cannot have
    └── CheckpointError          (ValueError)           a file or a dict of parameters that does not fit, or is damaged
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackendMismatchError",
    "BackendUnavailableError",
    "CheckpointError",
    "DTypeError",
    "KernelUnsupportedError",
    "PolyattnError",
    "ShapeError",
    "UnknownBackendError",
]


class PolyattnError(Exception):
    """The base of every exception that polyattn raises on purpose."""


class UnknownBackendError(PolyattnError, ValueError):
    """A backend name that no installed distribution provides, or a device named without a backend."""


class BackendUnavailableError(PolyattnError, ImportError):
    """A backend, or a device of it, that is known but cannot be used here; the message gives cause and remedy."""


class BackendMismatchError(PolyattnError, TypeError):
    """Arrays of one call from different libraries or devices, or an array that may not leave its library."""


class KernelUnsupportedError(PolyattnError, NotImplementedError):
    """The kernel that was asked for by name does not compute this problem; the message gives its reason."""


class ShapeError(PolyattnError, ValueError):
    """Shapes or axis lengths that do not fit together."""


class DTypeError(PolyattnError, TypeError):
    """An element type that an operation does not take, or that a library cannot hold."""


class ArgumentError(PolyattnError, ValueError):
    """An argument whose value is outside of what it may be: a dropout of 1.5, a negative window."""


class CheckpointError(PolyattnError, ValueError):
    """A checkpoint that is damaged or foreign, or parameters whose names, shapes or dtypes do not fit."""
