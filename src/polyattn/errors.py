"""The exceptions of polyattn.

Every message names the argument, the expected and the actual value, and the
remedy if there is one. Each class also derives from the built-in exception that
a caller would expect, so ``except ValueError`` works::

    PolyattnError
    ├── UnknownBackendError      (ValueError)           no backend of that name, or a device without a backend
    ├── BackendUnavailableError  (ImportError)          known, but it cannot be used here
    ├── BackendMismatchError     (TypeError)            arrays of different libraries or devices, or that may not move
    ├── KernelUnsupportedError   (NotImplementedError)  the required kernel does not support this problem
    ├── ShapeError               (ValueError)           shapes that do not fit
    ├── DTypeError               (TypeError)            element types that do not fit
    ├── ArgumentError            (ValueError)           any other argument with an invalid value
    ├── EngineError              (RuntimeError)         an engine of polyattn.distributed that is missing or was lost
    └── CheckpointError          (ValueError)           a file or a dict of parameters that does not fit, or is damaged
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackendMismatchError",
    "BackendUnavailableError",
    "CheckpointError",
    "DTypeError",
    "EngineError",
    "KernelUnsupportedError",
    "PolyattnError",
    "ShapeError",
    "UnknownBackendError",
]


class PolyattnError(Exception):
    """The base class of polyattn's exceptions."""


class UnknownBackendError(PolyattnError, ValueError):
    """A backend name that no installed distribution provides, or a device without a backend."""


class BackendUnavailableError(PolyattnError, ImportError):
    """A backend, or a device of it, that is known but cannot be used here; the message gives cause and remedy."""


class BackendMismatchError(PolyattnError, TypeError):
    """Arrays of one call from different libraries or devices, or an array that may not leave its library."""


class KernelUnsupportedError(PolyattnError, NotImplementedError):
    """The kernel that ``kernel=`` requires does not support this problem; the message gives the reason."""


class ShapeError(PolyattnError, ValueError):
    """Shapes or axis lengths that do not fit together."""


class DTypeError(PolyattnError, TypeError):
    """A dtype that an operation does not support, or that a library does not have."""


class ArgumentError(PolyattnError, ValueError):
    """An argument with an invalid value: a dropout of 1.5, a negative window."""


class EngineError(PolyattnError, RuntimeError):
    """Processes that are missing, were lost or disagree in a call of :mod:`polyattn.distributed`."""


class CheckpointError(PolyattnError, ValueError):
    """A damaged or unknown checkpoint file, or parameters with names, shapes or dtypes that do not fit."""
