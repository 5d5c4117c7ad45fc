"""Conversion of arrays between libraries and devices; all transfers go through this module.

On the host a conversion starts with a NumPy view of the source's memory (no copy),
because only NumPy can describe every layout. The target imports the view if it can
share its memory, else a contiguous copy. Between two libraries on the same accelerator,
arrays are exchanged directly through DLPack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from . import registry
from ._generic import Exporter
from .account import Crossing, permit, record
from .backend import Array, Backend, Place, dtype_name
from .errors import ArgumentError, BackendMismatchError, BackendUnavailableError, DTypeError, PolyattnError

__all__ = ["checked_device", "destination", "expect_usable", "move", "move_argument", "place_of", "to_backend"]


def to_backend(x: Array, name: str, device: str | None = None, copy: bool | None = None) -> Array:
    """Return ``x`` as an array of another library or on another device.

    Memory is shared if both libraries can describe the array. It is copied if
    the target cannot: negative or zero strides, orders other than C on JAX,
    read-only memory for a library that might write to it. Arrays converted to
    NumPy are writable. The dtype never changes.

    Parameters
    ----------
    x : array
        Of any library with a plugin or with ``__array_namespace__``, or any object with ``__dlpack__`` and
        ``__dlpack_device__``. Such an object is copied if its DLPack is older than version 1, which cannot mark
        memory as read-only, and refused if NumPy lacks its dtype.
    name : str
        The target backend.
    device : str, optional
        A device of that backend. None is the device of ``x`` if the backend can address it, else its default.
    copy : bool, optional
        True always copies; False never copies, and raises if a copy is needed; None copies if needed.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If there is no such backend or device, or it cannot be used.
    BackendMismatchError
        If ``x`` is no array, is traced or requires gradients, or has to be copied with ``copy=False``.
    DTypeError
        If the target lacks the dtype (float64 on JAX in 32-bit mode, for instance).
    ArgumentError
        If ``copy`` is not True, False or None.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> x = np.arange(6.0)
    >>> np.shares_memory(x, pa.to_backend(x, "numpy")), np.shares_memory(x, pa.to_backend(x, "numpy", copy=True))
    (True, False)
    """
    if copy not in (True, False, None):
        raise ArgumentError(f"copy: expected True, False or None, got {copy!r}")
    backend = registry.ready(name)
    x, source = _with_place(x)
    return move(x, destination(source, name, checked_device(backend, device)), source=source, copy=copy)


def _with_place(x: Array) -> tuple[Array, Place]:
    """Return an array and its place. An object on the host with only ``__dlpack__`` becomes a NumPy view."""
    try:
        registry.owner(x)
    except BackendMismatchError:
        if not hasattr(x, "__dlpack__"):
            raise
    else:
        return x, place_of({"x": x})
    try:
        exporter = Exporter(x)
        return exporter.to_numpy(x) if exporter.device == "cpu" else x, Place(exporter, exporter.device)
    except BackendMismatchError as error:
        raise BackendMismatchError(f"x: {error}") from error.__cause__


def place_of(arrays: Mapping[str, Array | None]) -> Place:
    """Return the common library and device of a call's arrays.

    Raises
    ------
    BackendMismatchError
        If they differ (the message names each argument's library and device), if there is no array, or if polyattn
        cannot compute with an array (masked, sparse).
    """
    found: Backend | None = None
    device: str | None = None
    kind: type | None = None
    for name, x in arrays.items():
        if x is None:
            continue
        if type(x) is not kind:  # most calls have arrays of one type
            kind, backend = type(x), registry.owner(x, name)
        unusable = backend.state(x).unusable
        if unusable is not None:
            raise _unusable(name, unusable)
        here = backend.device_of(x)
        if found is None or (device is None and backend is found):
            found, device = backend, here
        elif backend is not found or here not in (None, device):
            raise _mixed(arrays)
    if found is None:
        raise BackendMismatchError(f"{', '.join(arrays)}: expected an array, got {type(None).__name__}")
    return Place(found, device)


def expect_usable(**arrays: object) -> None:
    """Require that polyattn can compute with those of these objects that are arrays of a known library."""
    for name, x in arrays.items():
        try:
            unusable = registry.owner(x, name).state(x).unusable
        except BackendMismatchError:
            continue
        if unusable is not None:
            raise _unusable(name, unusable)


def _unusable(name: str, reason: str) -> BackendMismatchError:
    return BackendMismatchError(f"{name}: expected an array to compute with, but this one {reason}")


def checked_device(backend: Backend, device: str | None) -> str | None:
    """Return a device's name as the backend writes it; raise BackendUnavailableError if there is no such device."""
    if device is None:
        return None
    devices = backend.devices()
    if isinstance(device, str):
        folded = {name.casefold(): name for name in devices}
        wanted = device.casefold()
        # "cuda" is the first CUDA device, and "cpu:0" is the host, which the libraries call "cpu".
        for candidate in (wanted, f"{wanted}:0", wanted.removesuffix(":0")):
            if candidate in folded:
                return folded[candidate]
    raise BackendUnavailableError(
        f"device: backend {backend.name!r} has no device {device!r} here; it has {', '.join(map(repr, devices))}"
    )


def destination(source: Place, name: str, device: str | None) -> Place:
    """Return the place of a backend name and a device, for arrays from ``source``."""
    backend = registry.ready(name)
    if device is not None:
        return Place(backend, device)
    if backend is source.backend:
        return source
    return Place(backend, source.device if source.device in backend.devices() else backend.devices()[0])


def move(x: Array, place: Place, *, name: str = "x", source: Place | None = None, copy: bool | None = None) -> Array:
    """Return ``x`` moved to ``place``; an array that is there already is returned as it is and not counted."""
    if source is None:
        source = place_of({name: x})
    if source.backend is place.backend and (source.device == place.device or None in (source.device, place.device)):
        # A 0-d array may still be a NumPy scalar, which NumPy's functions return.
        kept = not copy and x.ndim > 0
        return x if kept else _attempt(copy, lambda: source.backend.asarray(x, source.device, copy), source, place)
    permit(x, name, source, place)
    try:
        result, copied = _transfer(x, source, place, copy)
    except (BackendMismatchError, DTypeError) as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    record(Crossing(name, str(source), str(place), copied))
    return result


def move_argument(x: Array, place: Place, *, name: str, source: Place) -> Array:
    """Move an argument of a call. Integers are narrowed if the target lacks their dtype, as none are moved back."""
    dtype = dtype_name(x.dtype)
    if place.backend is not source.backend and dtype in ("int64", "uint64", "uint32"):
        try:
            place.backend.dtype(dtype)
        except DTypeError as error:
            permit(x, name, source, place)
            values = source.backend.to_numpy(x)
            if values.size and (values.max() > np.iinfo(np.int32).max or values.min() < np.iinfo(np.int32).min):
                raise DTypeError(f"{name}: its values do not fit int32, and {error}") from None
            narrowed = place.backend.asarray(values.astype(np.int32), place.device, None)
            record(Crossing(name, str(source), str(place), True))
            return narrowed
    return move(x, place, name=name, source=source)


def _transfer(x: Array, source: Place, place: Place, copy: bool | None) -> tuple[Array, bool]:
    """Return the array moved to ``place``, and whether its elements were copied."""
    library, device = source.backend, place.device
    exporter = library if isinstance(library, Exporter) else None  # its dtypes may have any name
    if exporter is None:
        place.backend.dtype(dtype_name(x.dtype))  # raises if the target lacks the dtype
    if library is place.backend:  # between devices of one library
        return _attempt(copy, lambda: library.asarray(x, device, copy), source, place), True
    if device is not None and device != "cpu" and source.device == device:  # two libraries on the same accelerator
        with exporter.exchange() if exporter else nullcontext():
            return _attempt(copy, lambda: place.backend.asarray(x, device, copy), source, place), bool(copy)
    fetched = not library.shares(x)  # to_numpy copies
    if copy is False and fetched:
        raise BackendMismatchError(f"the memory of this array on {source} cannot be shared; pass copy=None")
    view = library.to_numpy(x)
    if exporter is not None:
        place.backend.dtype(dtype_name(view.dtype))
    if place.backend.shares(view) and (fetched or not copy):
        result = _attempt(copy, lambda: place.backend.asarray(view, device, None if fetched else copy), source, place)
        copied = fetched or not _shared(view, result, place.backend)
        if not copied or copy is not False:
            return result, copied
    if copy is False:
        raise BackendMismatchError(
            f"{place.backend.name} cannot share the memory of this array (strides {view.strides}, "
            f"writable {view.flags.writeable}); pass copy=None"
        )
    packed = np.array(view, dtype=view.dtype.newbyteorder("="), order="C", copy=True)
    return _attempt(None, lambda: place.backend.asarray(packed, device, None), source, place), True


def _attempt(copy: bool | None, convert: Callable[[], Array], source: Place, place: Place) -> Array:
    """Convert, with BackendMismatchError if the library does not support the array (a float8 dtype, for instance)."""
    try:
        return convert()
    except PolyattnError:
        raise
    except (BufferError, TypeError) as error:
        raise BackendMismatchError(f"{place.backend.name} does not take this array of {source}: {error}") from error
    except ValueError as error:
        if copy is False:
            raise BackendMismatchError(f"{source} to {place} needs a copy; pass copy=None") from error
        raise


def _shared(view: np.ndarray[Any, Any], result: Array, backend: Backend) -> bool:
    if view.size == 0:
        return True
    return backend.shares(result) and bool(backend.to_numpy(result).ctypes.data == view.ctypes.data)


def _mixed(arrays: Mapping[str, Array | None]) -> BackendMismatchError:
    places = []
    for name, x in arrays.items():
        if x is not None:
            backend = registry.owner(x, name)
            places.append(f"{name} is {Place(backend, backend.device_of(x))}")
    return BackendMismatchError(
        f"expected arrays of one library and device, got: {', '.join(places)}; "
        "convert with polyattn.to_backend(x, name, device=...)"
    )
