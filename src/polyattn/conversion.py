"""The one place where arrays change library or device.

On the host every conversion goes by way of a NumPy view of the source's memory
(no copy), because NumPy alone can describe every layout: the view is handed to
the target where the target can share it, else a packed copy is. Between two
libraries on the same accelerator the arrays go directly, through DLPack.
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

__all__ = ["checked_device", "destination", "move", "move_argument", "place_of", "to_backend"]


def to_backend(x: Array, name: str, device: str | None = None, copy: bool | None = None) -> Array:
    """Return ``x`` as an array of another library, or of another device.

    Memory is shared where both libraries can describe the array, and copied
    where the target cannot: negative or zero strides, orders other than C on
    JAX, read-only memory into a library that might write. Arrays that come to
    NumPy are writable. The element type never changes.

    Parameters
    ----------
    x : array
        Of any library with a plugin or with ``__array_namespace__``; or any object with ``__dlpack__`` and
        ``__dlpack_device__``. One that keeps to DLPack before version 1 cannot say that it may be written to, and
        is copied; one of a dtype that NumPy lacks stays out.
    name : str
        The backend to go to.
    device : str, optional
        A device of it. None keeps the device of ``x`` where the backend can address it, else its default.
    copy : bool, optional
        True copies always; False never, and raises where a copy is needed; None copies where it must.

    Raises
    ------
    UnknownBackendError, BackendUnavailableError
        If there is no such backend or device, or it cannot be used.
    BackendMismatchError
        If ``x`` is no array, is traced or requires gradients, or has to be copied with ``copy=False``.
    DTypeError
        If the target has no such element type (float64 on JAX in 32-bit mode, for instance).
    ArgumentError
        If ``copy`` is something else.

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
    x, home = _at_home(x)
    return move(x, destination(home, name, checked_device(backend, device)), home=home, copy=copy)


def _at_home(x: Array) -> tuple[Array, Place]:
    """Return an array and its place; of an object on the host that has ``__dlpack__`` alone, NumPy's view of it."""
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
    """Return the one library and device of a call's arrays.

    Raises
    ------
    BackendMismatchError
        If they differ, naming each argument's library and device, if there is none, or one of a kind that
        cannot be computed with (masked, sparse).
    """
    found: Backend | None = None
    device: str | None = None
    kind: type | None = None
    for name, x in arrays.items():
        if x is None:
            continue
        if type(x) is not kind:  # the arrays of a call mostly have one type
            kind, backend = type(x), registry.owner(x, name)
        unusable = backend.state(x).unusable
        if unusable is not None:
            raise BackendMismatchError(f"{name}: expected an array to compute with, but this one {unusable}")
        here = backend.device_of(x)
        if found is None or (device is None and backend is found):
            found, device = backend, here
        elif backend is not found or here not in (None, device):
            raise _mixed(arrays)
    if found is None:
        raise BackendMismatchError(f"{', '.join(arrays)}: expected an array, got {type(None).__name__}")
    return Place(found, device)


def checked_device(backend: Backend, device: str | None) -> str | None:
    """Return a device's name as the backend spells it; BackendUnavailableError where it has no such device."""
    if device is None:
        return None
    devices = backend.devices()
    if isinstance(device, str):
        folded = {name.casefold(): name for name in devices}
        wanted = device.casefold()
        # "cuda" is the first CUDA device, and "cpu:0" the host, which the libraries call "cpu".
        for candidate in (wanted, f"{wanted}:0", wanted.removesuffix(":0")):
            if candidate in folded:
                return folded[candidate]
    raise BackendUnavailableError(
        f"device: backend {backend.name!r} has no device {device!r} here; it has {', '.join(map(repr, devices))}"
    )


def destination(home: Place, name: str, device: str | None) -> Place:
    """Return the place that a backend's name and a device name, for arrays that are at ``home``."""
    backend = registry.ready(name)
    if device is not None:
        return Place(backend, device)
    if backend is home.backend:
        return home
    return Place(backend, home.device if home.device in backend.devices() else backend.devices()[0])


def move(x: Array, place: Place, *, name: str = "x", home: Place | None = None, copy: bool | None = None) -> Array:
    """Return ``x`` at ``place``; nothing is done, and nothing counted, where it is there already."""
    if home is None:
        home = place_of({name: x})
    if home.backend is place.backend and (home.device == place.device or None in (home.device, place.device)):
        # An array without axes may be a scalar so far: NumPy's functions return those.
        kept = not copy and x.ndim > 0
        return x if kept else _required(copy, lambda: home.backend.asarray(x, home.device, copy), home, place)
    permit(x, name, home, place)
    try:
        result, copied = _carry(x, home, place, copy)
    except (BackendMismatchError, DTypeError) as error:
        raise type(error)(f"{name}: {error}") from error.__cause__
    record(Crossing(name, str(home), str(place), copied))
    return result


def move_argument(x: Array, place: Place, *, name: str, home: Place) -> Array:
    """Move an argument of a call; integers never come back, so they are narrowed where the target lacks their type."""
    dtype = dtype_name(x.dtype)
    if place.backend is not home.backend and dtype in ("int64", "uint64", "uint32"):
        try:
            place.backend.dtype(dtype)
        except DTypeError as error:
            permit(x, name, home, place)
            values = home.backend.to_numpy(x)
            if values.size and (values.max() > np.iinfo(np.int32).max or values.min() < np.iinfo(np.int32).min):
                raise DTypeError(f"{name}: its values do not fit int32, and {error}") from None
            narrowed = place.backend.asarray(values.astype(np.int32), place.device, None)
            record(Crossing(name, str(home), str(place), True))
            return narrowed
    return move(x, place, name=name, home=home)


def _carry(x: Array, home: Place, place: Place, copy: bool | None) -> tuple[Array, bool]:
    """Return the array at its place, and whether its elements were copied."""
    source, device = home.backend, place.device
    exporter = source if isinstance(source, Exporter) else None  # whose dtypes may have any name
    if exporter is None:
        place.backend.dtype(dtype_name(x.dtype))  # raises where the target cannot hold it
    if source is place.backend:  # between devices of one library
        return _required(copy, lambda: source.asarray(x, device, copy), home, place), True
    if device is not None and device != "cpu" and home.device == device:  # one accelerator, two libraries
        with exporter.exchange() if exporter else nullcontext():
            return _required(copy, lambda: place.backend.asarray(x, device, copy), home, place), bool(copy)
    fetched = not source.shares(x)  # to_numpy has to copy it
    if copy is False and fetched:
        raise BackendMismatchError(f"the memory of this array on {home} cannot be shared; pass copy=None")
    view = source.to_numpy(x)
    if exporter is not None:
        place.backend.dtype(dtype_name(view.dtype))
    if place.backend.shares(view) and (fetched or not copy):
        result = _required(copy, lambda: place.backend.asarray(view, device, None if fetched else copy), home, place)
        copied = fetched or not _shared(view, result, place.backend)
        if not copied or copy is not False:
            return result, copied
    if copy is False:
        raise BackendMismatchError(
            f"{place.backend.name} cannot share the memory of this array (strides {view.strides}, "
            f"writable {view.flags.writeable}); pass copy=None"
        )
    packed = np.array(view, dtype=view.dtype.newbyteorder("="), order="C", copy=True)
    return _required(None, lambda: place.backend.asarray(packed, device, None), home, place), True


def _required(copy: bool | None, convert: Callable[[], Array], home: Place, place: Place) -> Array:
    """Convert, and say of what a library does not take (float8, mostly) that it does not."""
    try:
        return convert()
    except PolyattnError:
        raise
    except (BufferError, TypeError) as error:
        raise BackendMismatchError(f"{place.backend.name} does not take this array of {home}: {error}") from error
    except ValueError as error:
        if copy is False:
            raise BackendMismatchError(f"{home} to {place} needs a copy; pass copy=None") from error
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
