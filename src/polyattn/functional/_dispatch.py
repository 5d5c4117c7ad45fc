"""How a call is dispatched: select a backend, move the arrays there, compute, move the results back.

A public function of :mod:`polyattn.functional` validates its arguments and calls :func:`run`, :func:`run_with_cache`
or :func:`run_backward`. Backend selection and conversion happen only here; the native functions that are called from
here take arrays of one library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ..backend import Array, Backend, Cache, Place, RowStatistics, dtype_name, flatten
from ..conversion import destination, move, move_argument, place_of
from ..errors import BackendMismatchError, DTypeError
from ..selection import Bound, selected
from ._checks import expect_shape

Arrays = Mapping[str, Array | None]
Grads = TypeVar("Grads")


class Operation(NamedTuple):
    """A pair of native functions.

    ``forward(backend, **arrays, **options)`` returns ``(y, saved)`` with ``saved`` a record;
    ``backward(backend, dy, saved)`` returns a named tuple of gradients, with a field for each array; some may be None.
    """

    name: str
    forward: Callable[..., tuple[Array, Any]]
    backward: Callable[..., Any]


class Placed(NamedTuple):
    """The arrays of a call on its compute device, that place, and the input device (``home``)."""

    arrays: dict[str, Any]
    place: Place
    home: Place

    def to_input_device(self, y: Array, name: str) -> Array:
        """Return a result on the input device."""
        if self.place is self.home and y.ndim:
            return y
        native = self.place.backend
        device = self.place.device if native is self.home.backend else native.device_of(y)
        return move(y, self.home, name=name, source=Place(native, device))


def run(
    operation: Operation, arrays: Arrays, options: Mapping[str, Any] | None = None, backend: str | None = None
) -> Array:
    """Return the result of an operation, without a cache."""
    placed = to_compute_device(arrays, backend)
    y = compute(placed.place.backend, operation.forward, operation.backward, placed.arrays, options or {})
    return placed.to_input_device(y, operation.name)


def run_with_cache(
    operation: Operation, arrays: Arrays, options: Mapping[str, Any] | None = None, backend: str | None = None
) -> tuple[Array, Cache]:
    """Return the result of an operation and the cache for its backward."""
    placed = to_compute_device(arrays, backend)
    with placed.place.backend.scope():
        y, saved = operation.forward(placed.place.backend, **placed.arrays, **(options or {}))
    return finish(operation.name, placed, y, saved)


def run_backward(
    operation: Operation, dy: Array, cache: Cache, grads: Callable[..., Grads], *, name: str = "dy", **more: Any
) -> Grads:
    """Return the gradients of an operation's inputs, on the input device, as the named tuple ``grads``."""
    expect_cache(cache, operation.name)
    dy, native = upstream(dy, cache.y_shape, cache.y_dtype, cache, name), cache.place.backend
    with native.scope():
        native_grads = operation.backward(native, dy, cache.saved, **more)
    return grads(**to_home(native_grads._asdict(), cache))


def compute(
    native: Backend, forward: Callable[..., tuple[Array, Any]], backward: Callable[..., Any], arrays: Arrays,
    options: Mapping[str, Any],
) -> Array:  # fmt: skip
    """Return a native forward's result; the library's automatic differentiation uses the native backward.

    ``backward(backend, dy, saved)`` returns gradients by name, for some or all of the arrays.
    """
    if native.follows(*arrays.values()):
        differentiable = flat(native, forward, backward, tuple(arrays), options)
        if differentiable is not None:
            return differentiable(*arrays.values())
    with native.scope():
        return forward(native, **arrays, **options)[0]


def flat(
    native: Backend, forward: Callable[..., tuple[Array, Any]], backward: Callable[..., Any], names: tuple[str, ...],
    options: Mapping[str, Any],
) -> Callable[..., Array] | None:  # fmt: skip
    """Return a native forward as a function of arrays alone that the library can differentiate, or None."""

    def flat_forward(*xs: Array) -> tuple[Array, Any]:
        return forward(native, **dict(zip(names, xs, strict=True)), **options)

    def flat_backward(dy: Array, saved: Any) -> tuple[Any, ...]:
        grads = backward(native, dy, saved)
        grads = grads if isinstance(grads, dict) else grads._asdict()
        return tuple(grads.get(name) for name in names)

    return native.differentiable(flat_forward, flat_backward)


# ---- select and move ---------------------------------------------------------------------------------------------


def to_compute_device(arrays: Arrays, backend: str | None = None) -> Placed:
    """Select the compute device of a call, and move its arrays there."""
    home, place = places(arrays, backend)
    return Placed(dict(arrays), home, home) if place is home else moved(arrays, home, place)


def places(arrays: Arrays, backend: str | None) -> tuple[Place, Place]:
    """Return the input device and the compute device of a call."""
    home, selection = place_of(arrays), selected(backend)
    return home, home if selection is None else destination(home, selection.backend, selection.device)


def to_bound_device(arrays: Arrays, bound: Bound, what: str, remedy: str) -> Placed:
    """Move arrays to the place to which a layer or a key-value cache is bound, or raise if it does not move inputs.

    ``remedy`` ends the error message; the name of the arrays' backend is formatted into it.
    """
    home, place = place_of(arrays), bound.place
    foreign = home.backend is not place.backend or home.device not in (None, place.device)
    if foreign and not bound.moves_inputs:
        raise BackendMismatchError(
            f"{next(iter(arrays))}: this {what} was made on {place} by default and got an array of {home}; "
            + remedy.format(home.backend.name)
        )
    return moved(arrays, home, place)


def moved(arrays: Arrays, home: Place, place: Place) -> Placed:
    """Return the arrays of a call, moved from ``home`` to ``place``."""
    if place is home or place == home:
        return Placed(dict(arrays), home, home)
    native = home.backend
    there = {
        name: None if x is None else move_argument(x, place, name=name, source=Place(native, native.device_of(x)))
        for name, x in arrays.items()
    }
    return Placed(there, place, home)


# ---- caches, upstream gradients, and results on the input device ---------------------------------------------------


def finish(
    op: str, placed: Placed, y: Array, saved: Any, statistics: RowStatistics | None = None
) -> tuple[Array, Cache]:
    """Return a native result on the input device, and the cache for its backward."""
    wait(saved, placed.place, placed.home)
    kernel = getattr(saved, "kernel_name", None)
    cache = Cache(op, saved, placed.place, placed.home, tuple(y.shape), dtype_name(y.dtype), kernel, statistics)
    return placed.to_input_device(y, op), cache


def wait(record: Any, place: Place, home: Place) -> None:
    """Wait until the arrays of a record are computed: until then they may read memory of the inputs' library."""
    if place.backend is not home.backend:
        place.backend.synchronize(*flatten(record)[0])


def upstream(dy: Array, shape: tuple[int, ...], dtype: str, cache: Cache, name: str) -> Array:
    """Check the upstream gradient of a result of that shape and dtype, and move it to the compute device."""
    here = place_of({name: dy})
    if here.backend is not cache.home.backend or (None not in (here.device, cache.home.device) and here != cache.home):
        raise BackendMismatchError(f"{name}: expected an array like the inputs, on {cache.home}, got one on {here}")
    expect_shape(name, dy, shape)
    if dtype_name(dy.dtype) != dtype:
        raise DTypeError(f"{name}: expected {dtype}, the result's dtype, got {dtype_name(dy.dtype)}")
    return move(dy, cache.place, name=name, source=here)


def to_home(grads: dict[str, Array | None], cache: Cache) -> dict[str, Array | None]:
    """Return gradients by name, moved to the input device."""
    if cache.place is cache.home and 0 not in [1 if dx is None else dx.ndim for dx in grads.values()]:
        return grads  # a 0-d result may be a NumPy scalar, which is converted to an array below
    wait(tuple(grads.values()), cache.place, cache.home)
    return {name: None if dx is None else move(dx, cache.home, name=f"d{name}") for name, dx in grads.items()}


def expect_cache(cache: Cache, op: str) -> None:
    """Require a cache from the forward of the operation ``op``."""
    if not isinstance(cache, Cache) or cache.op != op:
        got = f"the cache of {_forward_of(cache.op)}" if isinstance(cache, Cache) else type(cache).__name__
        raise BackendMismatchError(f"cache: expected the cache of {_forward_of(op)}, got {got}")


def _forward_of(op: str) -> str:
    """Return the name of the forward for messages: a method for a layer, whose name is a class, else a function."""
    return f"{op}.forward" if op[0].isupper() else f"{op}_forward"
