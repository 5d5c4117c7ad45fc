"""The stairs that every operation goes up and down: validate, select, move, compute, bring back.

A public function of :mod:`polyattn.functional` is a check of its arguments and
one of the three methods below. Selection and conversion happen here, once; the
native functions on the lower floor see arrays of one library.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from ..backend import Array, Cache, Place, dtype_name
from ..conversion import bring, destination, move, place_of
from ..errors import BackendMismatchError, DTypeError, ShapeError
from ..kernels import FLOAT_DTYPES
from ..registry import looks_like_array
from ..selection import Bound, selected

Grads = TypeVar("Grads")


@dataclass(frozen=True)
class Trip:
    """The arrays of one call at the place where it is computed, and the way home."""

    home: Place
    place: Place
    arrays: tuple[Array | None, ...]

    def back(self, y: Array, name: str) -> Array:
        """Bring a result to where the inputs came from."""
        return move(y, self.home, name=name, home=Place(self.place.backend, self._device(y)))

    def _device(self, y: Array) -> str | None:
        return self.place.device if self.place.backend is self.home.backend else self.place.backend.device_of(y)


def embark(arrays: Mapping[str, Array | None], backend: str | None = None) -> Trip:
    """Select where a call is computed, and move its arrays there."""
    home, place = route(arrays, backend)
    return Trip(home, place, carried(arrays, home, place))


def embark_for(bound: Bound, arrays: Mapping[str, Array | None], what: str, remedy: str) -> Trip:
    """Move arrays to where a layer or a cache is bound, if it takes foreign ones; ``remedy`` has a place for theirs."""
    place, home = bound.place, place_of(arrays)
    foreign = home.backend is not place.backend or home.device not in (None, place.device)
    if foreign and not bound.moves_inputs:
        raise BackendMismatchError(
            f"{next(iter(arrays))}: this {what} was made on {place} by default and got an array of {home}; "
            + remedy.format(home.backend.name)
        )
    return Trip(home, place, carried(arrays, home, place))


def route(arrays: Mapping[str, Array | None], backend: str | None) -> tuple[Place, Place]:
    """Return where the arrays of a call are, and where it is computed."""
    home, selection = place_of(arrays), selected(backend)
    return home, home if selection is None else destination(home, selection.backend, selection.device)


def carried(arrays: Mapping[str, Array | None], home: Place, place: Place) -> tuple[Array | None, ...]:
    """Move the arrays of a call."""
    if place == home:
        return tuple(arrays.values())
    native = home.backend
    return tuple(
        None if x is None else bring(x, place, name=name, home=Place(native, native.device_of(x)))
        for name, x in arrays.items()
    )


@dataclass(frozen=True)
class Operation:
    """A pair of native functions with everything around them.

    ``forward(backend, *arrays, **static)`` returns ``(y, saved)``, ``saved`` a tuple of arrays;
    ``backward(backend, dy, saved, **static)`` a gradient for each array, in its dtype.
    ``prepare(place, arrays, static)`` may settle static arguments once the arrays are in place.
    """

    name: str
    forward: Callable[..., tuple[Array, tuple[Any, ...]]]
    backward: Callable[..., tuple[Any, ...]]
    prepare: Callable[[Place, tuple[Any, ...], dict[str, Any]], dict[str, Any]] | None = None

    def call(
        self, arrays: Mapping[str, Array | None], static: dict[str, Any] | None = None, backend: str | None = None
    ) -> Array:
        """Return y and keep nothing."""
        return self.evaluate(embark(arrays, backend), static or {})

    def record(
        self, arrays: Mapping[str, Array | None], static: dict[str, Any] | None = None, backend: str | None = None
    ) -> tuple[Array, Cache]:
        """Return y and the cache that the backward needs."""
        return self.remember(embark(arrays, backend), static or {})

    def pull(self, dy: Array, cache: Cache, grads: Callable[..., Grads]) -> Grads:
        """Return the gradients of the inputs, at home."""
        return grads(*homeward(self.reverse(dy, cache), cache, grads))

    def evaluate(self, trip: Trip, static: dict[str, Any], parameters: tuple[Array | None, ...] = ()) -> Array:
        """Return y, at home; the library's own differentiation goes through the native backward.

        ``parameters`` are arrays that live where the computation is: a layer's.
        """
        native, settings = trip.place.backend, self._settled(trip, static)

        def forward(*xs: Array) -> tuple[Array, tuple[Any, ...]]:
            return self.forward(native, *xs, **settings)

        def backward(dy: Array, saved: Any) -> tuple[Any, ...]:
            return self.backward(native, dy, saved, **settings)

        return trip.back(native.differentiable(forward, backward)(*trip.arrays, *parameters), self.name)

    def remember(
        self, trip: Trip, static: dict[str, Any], parameters: tuple[Array | None, ...] = ()
    ) -> tuple[Array, Cache]:
        """Return y, at home, and the cache."""
        native, settings = trip.place.backend, self._settled(trip, static)
        with native.scope():
            y, saved = self.forward(native, *trip.arrays, *parameters, **settings)
        wait(saved, trip.place, trip.home)
        return trip.back(y, self.name), make_cache(self.name, y, saved, settings, trip)

    def reverse(
        self, dy: Array, cache: Cache, *, name: str = "dy", inputs: bool = True, **more: Any
    ) -> tuple[Any, ...]:
        """Return the gradients of all arrays, parameters too, where they were computed.

        Without ``inputs`` those of the inputs are left out, where the operation's backward knows how to.
        """
        dy = upstream(dy, cache, self.name, name)
        native = cache.place.backend
        if not inputs:
            more["inputs"] = False
        with native.scope():
            dxs = self.backward(native, dy, cache.arrays, **settings_of(cache), **more)
        wait(dxs, cache.place, cache.home)
        return dxs

    def _settled(self, trip: Trip, static: dict[str, Any]) -> dict[str, Any]:
        return static if self.prepare is None else self.prepare(trip.place, trip.arrays, static)


def wait(arrays: tuple[Any, ...], place: Place, home: Place) -> None:
    """Wait for what stays where it was computed: until then it may still read memory of the caller's library."""
    if place.backend is not home.backend:
        place.backend.synchronize(*(x for x in arrays if x is not None))


def make_cache(name: str, y: Array, saved: tuple[Any, ...], static: dict[str, Any], trip: Trip) -> Cache:
    """Return a cache that also remembers what ``dy`` has to look like."""
    facts = {**static, "y_shape": tuple(y.shape), "y_dtype": dtype_name(y.dtype)}
    kernel = getattr(static.get("settings"), "kernel", None)
    return Cache(name, saved, tuple(facts.items()), trip.place, trip.home, kernel)


def settings_of(cache: Cache) -> dict[str, Any]:
    """Return the static arguments of the native functions."""
    return {name: value for name, value in cache.static if name not in ("y_shape", "y_dtype")}


def upstream(dy: Array, cache: Cache, op: str, name: str = "dy") -> Array:
    """Check an upstream gradient against its cache, and move it to where the backward runs."""
    expect_cache(cache, op)
    facts = dict(cache.static)
    return upstream_of(facts["y_shape"], facts["y_dtype"], dy, cache, name)


def upstream_of(shape: tuple[int, ...], dtype: str, dy: Array, cache: Cache, name: str) -> Array:
    """Check the gradient of a result of that shape and dtype, and move it to where the backward runs."""
    here = place_of({name: dy})
    if here.backend is not cache.home.backend or (None not in (here.device, cache.home.device) and here != cache.home):
        raise BackendMismatchError(f"{name}: expected an array like the inputs, on {cache.home}, got one on {here}")
    expect_shape(name, dy, shape)
    if dtype_name(dy.dtype) != dtype:
        raise DTypeError(f"{name}: expected {dtype}, the result's dtype, got {dtype_name(dy.dtype)}")
    return move(dy, cache.place, name=name, home=here)


def expect_cache(cache: Cache, op: str) -> None:
    """Require the cache of an operation's own forward."""
    if not isinstance(cache, Cache) or cache.op != op:
        got = f"the cache of {_forward_of(cache.op)}" if isinstance(cache, Cache) else type(cache).__name__
        raise BackendMismatchError(f"cache: expected the cache of {_forward_of(op)}, got {got}")


def _forward_of(op: str) -> str:
    """Return how the caller writes an operation's forward: a layer's, which has a class name, is a method."""
    return f"{op}.forward" if op[0].isupper() else f"{op}_forward"


def homeward(dxs: tuple[Any, ...], cache: Cache, grads: Any) -> tuple[Any, ...]:
    """Bring gradients to where the inputs came from."""
    names: tuple[str, ...] = getattr(grads, "_fields", ())
    named = zip(names, dxs, strict=True)
    return tuple(None if dx is None else move(dx, cache.home, name=f"d{name}") for name, dx in named)


# ---- what the checks are made of -----------------------------------------------------------------------------------


class Shaped(NamedTuple):
    """An array's shape and dtype, where that is all there is to look at."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


def is_floating(x: Array) -> bool:
    """Say whether an array holds real floating-point numbers of a kind we compute with."""
    return dtype_name(x.dtype) in FLOAT_DTYPES


def is_integer(x: Array) -> bool:
    """Say whether an array holds integers (booleans are none)."""
    return dtype_name(x.dtype).removeprefix("u").startswith("int")


def expect_floating(**arrays: Array | None) -> None:
    """Require arrays of a real floating dtype."""
    for name, x in arrays.items():
        if x is not None and not is_floating(_array(name, x)):
            raise DTypeError(
                f"{name}: expected a floating dtype ({', '.join(FLOAT_DTYPES)}), got {dtype_name(x.dtype)}"
            )


def expect_dtype(dtype: str, whose: str, **arrays: Array | None) -> None:
    """Require floating arrays of one given dtype: ``whose`` it is, the message says."""
    expect_floating(**arrays)
    for name, x in arrays.items():
        if x is not None and dtype_name(x.dtype) != dtype:
            raise DTypeError(f"{name}: expected {dtype}, {whose} dtype, got {dtype_name(x.dtype)}")


def checked_dtype(dtype: Any) -> str:
    """Return the name of a dtype that parameters and the like may have."""
    name = dtype if isinstance(dtype, str) else dtype_name(dtype)
    if name not in FLOAT_DTYPES:
        raise DTypeError(f"dtype: expected one of {', '.join(FLOAT_DTYPES)}, got {shown(dtype)}")
    return name


def expect_one_dtype(**arrays: Array | None) -> None:
    """Require floating arrays of one and the same dtype."""
    expect_floating(**arrays)
    dtypes = {name: dtype_name(x.dtype) for name, x in arrays.items() if x is not None}
    if len(set(dtypes.values())) > 1:
        raise DTypeError(f"expected one dtype, got {', '.join(f'{name} {dtype}' for name, dtype in dtypes.items())}")


def expect_shape(name: str, x: Array, shape: tuple[int, ...]) -> None:
    """Require an exact shape."""
    if tuple(x.shape) != tuple(shape):
        raise ShapeError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}")


def expect_rank(name: str, x: Array, rank: int) -> None:
    """Require at least so many axes."""
    if _array(name, x).ndim < rank:
        least = "1 axis" if rank == 1 else f"{rank} axes"
        raise ShapeError(f"{name}: expected at least {least}, got shape {tuple(x.shape)}")


def expect_arrays(**arrays: Array) -> None:
    """Require arrays, where nothing else is known of them yet."""
    for name, x in arrays.items():
        _array(name, x)


def is_number(x: Any) -> bool:
    """Say whether a static argument is a real number, Python's or NumPy's, and no boolean."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def shown(x: Any) -> str:
    """Return a wrong argument as a message shows it: as it is written where that is short, else its type."""
    text = repr(x)
    return text if len(text) <= 40 and "\n" not in text else type(x).__name__


def _array(name: str, x: Array) -> Array:
    if not looks_like_array(x):
        raise BackendMismatchError(f"{name}: expected an array, got {type(x).__name__}")
    return x
