"""The base class of layers: parameters by name, child layers, the place of a layer, and the dispatch of its calls."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from .. import registry
from ..backend import Array, Backend, Cache, Place, dtype_name
from ..checkpoint import read_tensors, write_tensors
from ..conversion import checked_device, move, place_of
from ..errors import BackendMismatchError, CheckpointError, ShapeError
from ..functional._checks import checked_dtype, expect_dtype, expect_rank
from ..functional._dispatch import Placed, compute, expect_cache, finish, to_bound_device, to_home, upstream, wait
from ..selection import Bound, bound

__all__ = ["Layer", "named"]

Inputs = TypeVar("Inputs", bound=NamedTuple)


class Layer:
    """The base class of layers: parameters, child layers, forward and backward.

    A subclass assigns its child layers to attributes and implements :meth:`native_forward` and
    :meth:`native_backward`, which call those of the children.

    A layer is bound to a place when it is created: ``backend=``, else the selection
    in force, else NumPy. Bound by argument or selection, it takes arrays of any
    library and returns arrays of that library; bound by default, it takes NumPy arrays
    only. A layer that is bound to JAX is a pytree with the parameters as leaves.
    """

    def __init__(
        self, parameters: Mapping[str, np.ndarray[Any, Any]], dtype: str, backend: str | None, device: str | None
    ) -> None:
        self._place, self._moves_inputs = bound(backend, device)
        self._dtype = checked_dtype(dtype)
        self._parameters = {name: _created(x, self._dtype, self._place) for name, x in parameters.items()}
        self._place.backend.register(type(self))

    # ---- properties -------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """The name of the backend to which the layer is bound."""
        return self._place.backend.name

    @property
    def device(self) -> str | None:
        """The device of the parameters."""
        return self._place.device

    @property
    def place(self) -> Place:
        """The place where the parameters are and calls are computed."""
        return self._place

    @property
    def dtype(self) -> str:
        """The dtype of the parameters, and of the inputs that the layer takes."""
        return self._dtype

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        raise NotImplementedError

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.config().items())
        return f"{type(self).__name__}({arguments}, dtype={self.dtype!r}, backend={self.backend!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copy and pickle, with the backend by name, as there is one instance in a process."""
        return {**self.__dict__, "_place": (self._place.backend.name, self._place.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, device = state["_place"]
        self.__dict__.update(state, _place=Place(registry.ready(name), device))
        self._place.backend.register(type(self))

    # ---- forward and backward, on native arrays of the layer's library ---------------------------------------------

    def native_forward(self, backend: Backend, *inputs: Any, **arguments: Any) -> tuple[Array, Any]:
        """Return ``(y, saved)``, with ``saved`` the record that the backward needs."""
        raise NotImplementedError

    def native_backward(self, backend: Backend, dy: Array, saved: Any) -> tuple[Any, dict[str, Array]]:
        """Return the gradients of the inputs, as a named tuple, and those of the parameters in their order."""
        raise NotImplementedError

    # ---- parameters -------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Array]:
        """Return the parameters by dotted name, in a new dict with the layer's own arrays."""
        found = {}
        for name, child in vars(self).items():
            if isinstance(child, Layer):
                for key, x in child.parameters().items():
                    found[f"{name}.{key}"] = x
        return {**found, **self._parameters}

    def with_parameters(self, parameters: Mapping[str, Array]) -> Self:
        """Return a layer that uses these arrays, not copies: for a training step, also one that ``jax.jit`` traces.

        Raises
        ------
        CheckpointError
            If names, shapes or dtypes do not match the layer's.
        BackendMismatchError
            If the arrays are not of the library and device to which the layer is bound.
        """
        self.expect_parameters(parameters)
        self._expect_at_place(parameters)
        return self.with_arrays(parameters)

    def with_arrays(
        self, parameters: Mapping[str, Any], *, dtype: str | None = None, place: Place | None = None
    ) -> Self:
        """Return a layer of the same architecture that uses these arrays, which are not checked.

        Give ``dtype`` and ``place`` of the arrays if they differ from this layer's. If a place is given, the new layer
        takes inputs of any library.
        """
        other = object.__new__(type(self))
        for name, value in vars(self).items():  # torch.compile traces this, not an update of __dict__
            setattr(other, name, value)
        other._parameters = {name: parameters[name] for name in self._parameters}
        if dtype is not None:
            other._dtype = dtype
        if place is not None:
            other._place, other._moves_inputs = place, True
        for name, child in self._children().items():
            of_child = {key: parameters[f"{name}.{key}"] for key in child.parameters()}
            setattr(other, name, child.with_arrays(of_child, dtype=dtype, place=place))
        return other

    def load_parameters(self, parameters: Mapping[str, Array]) -> None:
        """Replace the parameters by copies of these arrays, of any library.

        Raises
        ------
        CheckpointError
            If names, shapes or dtypes do not match the layer's, which does not change then.
        """
        self.expect_parameters(parameters)
        with self._place.backend.scope():  # copies that autograd does not record
            copies = {name: move(parameters[name], self._place, name=name, copy=True) for name in self.parameters()}
        before = self.parameters()
        try:
            self._assign(copies)
        except BaseException:  # an interrupt: all parameters are replaced, or none
            self._assign(before)
            raise

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters to a safetensors file, atomically."""
        write_tensors(path, self.parameters(), {"layer": type(self).__name__})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load the parameters that a layer of the same architecture saved.

        Raises
        ------
        CheckpointError
            If the file is damaged, or its names, shapes or dtypes do not match the layer's.
        """
        tensors, _ = read_tensors(path)
        try:
            self.load_parameters(tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{os.fspath(path)}: {error}") from None

    def to(self, backend: str, device: str | None = None) -> Self:
        """Return the layer on another backend or device; the new layer takes arrays of any library."""
        chosen = registry.ready(backend)
        device = checked_device(chosen, device)
        if device is None:
            device = self.device if self.device in chosen.devices() else chosen.devices()[0]
        place = Place(chosen, device)
        moved = {name: move(x, place, name=name) for name, x in self.parameters().items()}
        other = self.with_arrays(moved, place=place)
        chosen.register(type(self))
        return other

    def expect_parameters(self, parameters: Mapping[str, Array]) -> None:
        """Require the names, shapes and dtypes of this layer's parameters.

        Raises
        ------
        CheckpointError
            With all names that are missing, unexpected or do not fit.
        """
        if not isinstance(parameters, Mapping):
            raise CheckpointError(f"parameters: expected a dict of arrays by name, got {type(parameters).__name__}")
        own = self.parameters()
        missing = [name for name in own if name not in parameters]
        unexpected = sorted(str(name) for name in parameters if name not in own)
        misfits = [
            f"{name}: expected {tuple(mine.shape)} {self.dtype}, got {_described(parameters[name])}"
            for name, mine in own.items()
            if name in parameters and _described(parameters[name]) != f"{tuple(mine.shape)} {self.dtype}"
        ]
        faults = [
            f"{what} {listed(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        if faults or misfits:
            raise CheckpointError(f"parameters do not fit {type(self).__name__}: {'; '.join([*faults, *misfits])}")

    def flattened(self) -> tuple[tuple[Array, ...], LayerStructure]:
        """Return the parameters and the rest of the layer, as JAX needs them for a pytree."""
        return tuple(self.parameters().values()), LayerStructure(self)

    @classmethod
    def unflattened(cls, structure: LayerStructure, parameters: Sequence[Any]) -> Self:
        """Reverse :meth:`flattened`. Parameters may be any objects: gradients, placeholders, stacked parameters."""
        layer: Any = structure.layer.with_arrays(dict(zip(structure.names, parameters, strict=True)))
        return layer  # type: ignore[no-any-return]  # the structure is of this class

    def _assign(self, parameters: Mapping[str, Array]) -> None:
        self._parameters = {name: parameters[name] for name in self._parameters}
        for name, child in self._children().items():
            child._assign({key: parameters[f"{name}.{key}"] for key in child.parameters()})

    def _children(self) -> dict[str, Layer]:
        return {name: x for name, x in vars(self).items() if isinstance(x, Layer)}

    def _expect_at_place(self, parameters: Mapping[str, Array]) -> None:
        for name, x in parameters.items():
            place = place_of({name: x})
            if place.backend is not self._place.backend or place.device not in (None, self._place.device):
                raise BackendMismatchError(
                    f"{name}: expected an array of {self._place}, to which the layer is bound, got one of {place}; "
                    "convert it with polyattn.to_backend, or copy it in with load_parameters"
                )

    # ---- dispatch: from the caller's arrays to native arrays, and back ----------------------------------------------

    def _call(self, inputs: Mapping[str, Array | None], **options: Any) -> Array:
        """Return the result; the library's automatic differentiation uses the native backward, also for parameters."""
        placed, parameters = self._placed(inputs), self.parameters()

        def forward(backend: Backend, **arrays: Any) -> tuple[Array, Any]:
            given = {name: arrays.pop(name) for name in parameters}
            same = all(given[name] is x for name, x in parameters.items())
            layer = self if same else self.with_arrays(given)
            return layer.native_forward(backend, **arrays)

        def backward(backend: Backend, dy: Array, saved: Any) -> dict[str, Any]:
            dinputs, grads = self.native_backward(backend, dy, saved)
            return {**dinputs._asdict(), **grads}

        y = compute(placed.place.backend, forward, backward, {**placed.arrays, **parameters}, options)
        return placed.to_input_device(y, type(self).__name__)

    def _call_with_cache(self, inputs: Mapping[str, Array | None], **options: Any) -> tuple[Array, Cache]:
        placed = self._placed(inputs)
        with placed.place.backend.scope():
            y, saved = self.native_forward(placed.place.backend, **placed.arrays, **options)
        return finish(type(self).__name__, placed, y, saved)

    def _call_backward(self, dy: Array, cache: Cache, **options: Any) -> tuple[Any, dict[str, Array]]:
        """Return the gradients of the inputs, on the input device, and of the parameters, at the layer's place."""
        expect_cache(cache, type(self).__name__)
        dy, native = upstream(dy, cache.y_shape, cache.y_dtype, cache, "dy"), cache.place.backend
        with native.scope():
            dinputs, grads = self.native_backward(native, dy, cache.saved, **options)
        wait(grads, cache.place, cache.home)
        return type(dinputs)(**to_home(dinputs._asdict(), cache)), grads

    def _placed(self, inputs: Mapping[str, Array | None]) -> Placed:
        remedy = "bind it to a backend with layer.to({!r}, device=None)"
        given = {name: x for name, x in inputs.items() if x is not None}
        return to_bound_device(given, Bound(self._place, self._moves_inputs), "layer", remedy)

    def _expect_dtype(self, **inputs: Array | None) -> None:
        expect_dtype(self.dtype, "the layer's", **inputs)

    def _checked_input(self, x: Array, features: int) -> dict[str, Array | None]:
        """Check the only input of a layer, x (…, features), and return it by name."""
        self._expect_dtype(x=x)
        expect_rank("x", x, 1)
        if x.shape[-1] != features:
            raise ShapeError(f"x: expected (…, {features}), got {tuple(x.shape)}")
        return {"x": x}


class LayerStructure:
    """A layer without its parameters, hashable: compiled functions are looked up by it.

    Two are equal if their layers compute the same function of the parameters. It does not keep parameters alive.
    """

    __slots__ = ("_key", "layer", "names")

    def __init__(self, layer: Layer) -> None:
        self.names = tuple(layer.parameters())
        self.layer = layer.with_arrays(dict.fromkeys(self.names))
        bound = (layer._place, layer._moves_inputs)
        self._key = (type(layer), self.names, layer.dtype, bound, _hashable(layer.config()))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LayerStructure) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"<structure of {self._key[0].__name__}>"


def named(**of_children: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays of child layers by dotted name, such as "q_proj.weight"."""
    return {f"{child}.{name}": x for child, arrays in of_children.items() for name, x in arrays.items()}


def listed(names: Sequence[str], most: int = 8) -> str:
    """Return names as a list for a message, shortened to ``most`` names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _described(x: Any) -> str:
    return f"{tuple(x.shape)} {dtype_name(x.dtype)}" if registry.looks_like_array(x) else type(x).__name__


def _hashable(x: Any) -> Hashable:
    """Return a layer's settings, with their dicts and lists, as hashable tuples."""
    if isinstance(x, Mapping):
        return tuple((name, _hashable(value)) for name, value in sorted(x.items()))
    return tuple(map(_hashable, x)) if isinstance(x, list | tuple) else x


def _created(x: np.ndarray[Any, Any], dtype: str, place: Place) -> Array:
    """Return initial values at a place, rounded by NumPy if it has the dtype, so that all backends have the same."""
    target = place.backend.dtype(dtype)
    host = x.astype("float32" if dtype == "bfloat16" else dtype, order="C")
    native = place.backend.asarray(host, place.device, None)
    return native if dtype != "bfloat16" else place.backend.namespace().astype(native, target)
