"""What all layers share: parameters by name, the place to which a layer is bound, and the stairs around its formula."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from .. import registry
from ..backend import Array, Cache, Place, dtype_name
from ..checkpoint import read_tensors, write_tensors
from ..conversion import checked_device, move, place_of
from ..errors import BackendMismatchError, CheckpointError, ShapeError
from ..functional._operation import Operation, Trip, checked_dtype, embark_for, expect_dtype, expect_rank
from ..selection import Bound, bound
from ._frame import Frame

__all__ = ["Layer"]


class Layer:
    """Parameters over an operation. Subclasses give the operation, and say what each input is called.

    A layer is bound when it is made: to ``backend=``, else to the selection in
    force, else to NumPy. Bound by argument or selection it takes arrays of any
    library and returns that library's; bound by default it takes NumPy's.
    To JAX, once bound to it, a layer is a pytree with the parameters as its leaves.
    """

    _operation: ClassVar[Operation]
    _slots: ClassVar[tuple[str, ...]] = ()
    """The parameters in the order in which the operation takes them after the inputs; a layer may lack some."""

    def __init__(
        self, parameters: Mapping[str, np.ndarray[Any, Any]], dtype: str, backend: str | None, device: str | None
    ) -> None:
        self._place, self._moves_inputs = bound(backend, device)
        self._dtype = checked_dtype(dtype)
        self._parameters = {name: _created(x, self._dtype, self._place) for name, x in parameters.items()}
        self._place.backend.register(type(self))

    # ---- what it is -------------------------------------------------------------------------------------------

    @property
    def backend(self) -> str:
        """The name of the backend to which the layer is bound."""
        return self._place.backend.name

    @property
    def device(self) -> str | None:
        """The device of its parameters."""
        return self._place.device

    @property
    def dtype(self) -> str:
        """The element type of its parameters, and of the inputs that it takes."""
        return self._dtype

    def config(self) -> dict[str, Any]:
        """Return the arguments that make a layer of the same architecture."""
        raise NotImplementedError

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.config().items())
        return f"{type(self).__name__}({arguments}, dtype={self.dtype!r}, backend={self.backend!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds: of the backend its name, since there is one of it in a process."""
        return {**self.__dict__, "_place": (self._place.backend.name, self._place.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, device = state["_place"]
        self.__dict__.update(state, _place=Place(registry.ready(name), device))
        self._place.backend.register(type(self))

    def flattened(self) -> tuple[tuple[Array, ...], Frame]:
        """Return the parameters, and the rest of the layer: what JAX, to which a layer is a pytree, asks of it."""
        return tuple(self._parameters.values()), Frame(self)

    @classmethod
    def unflattened(cls, frame: Frame, parameters: Sequence[Any]) -> Self:
        """Reverse :meth:`flattened`. Parameters may be anything: gradients, placeholders, stacks of several layers'."""
        layer = object.__new__(cls)
        layer.__dict__.update(frame.state, _parameters=dict(zip(frame.names, parameters, strict=True)))
        return layer

    # ---- parameters -------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Array]:
        """Return the parameters by dotted name, in a dict of its own; the arrays are the layer's."""
        return dict(self._parameters)

    def with_parameters(self, parameters: Mapping[str, Array]) -> Self:
        """Return a layer that uses these very arrays: the training step, and what ``jax.jit`` traces.

        Raises
        ------
        CheckpointError
            If names, shapes or dtypes are not this layer's.
        BackendMismatchError
            If the arrays are not of the library and device to which the layer is bound.
        """
        self._check(parameters)
        self._expect_here(parameters)
        other = copy.copy(self)
        other._parameters = {name: parameters[name] for name in self._parameters}
        return other

    def load_parameters(self, parameters: Mapping[str, Array]) -> None:
        """Replace the parameters by copies of these, of any library.

        Raises
        ------
        CheckpointError
            If names, shapes or dtypes are not this layer's; it is then unchanged.
        """
        self._check(parameters)
        with self._place.backend.scope():  # a copy of the values, not a step that autograd goes back through
            self._parameters = {
                name: move(parameters[name], self._place, name=name, copy=True) for name in self._parameters
            }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the parameters as safetensors, whole or not at all."""
        write_tensors(path, self._parameters, {"layer": type(self).__name__})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read parameters that a layer of the same architecture saved.

        Raises
        ------
        CheckpointError
            If the file is damaged, or its names, shapes or dtypes are not this layer's.
        """
        tensors, _ = read_tensors(path)
        try:
            self.load_parameters(tensors)
        except CheckpointError as error:
            raise CheckpointError(f"{os.fspath(path)}: {error}") from None

    def to(self, backend: str, device: str | None = None) -> Self:
        """Return the layer on another backend or device; from there it takes arrays of any library."""
        chosen = registry.ready(backend)
        device = checked_device(chosen, device)
        if device is None:
            device = self.device if self.device in chosen.devices() else chosen.devices()[0]
        other = copy.copy(self)
        other._place, other._moves_inputs = Place(chosen, device), True
        chosen.register(type(self))
        other._parameters = {name: move(x, other._place, name=name) for name, x in self._parameters.items()}
        return other

    def _check(self, parameters: Mapping[str, Array]) -> None:
        if not isinstance(parameters, Mapping):
            raise CheckpointError(f"parameters: expected a dict of arrays by name, got {type(parameters).__name__}")
        missing = [name for name in self._parameters if name not in parameters]
        unexpected = sorted(str(name) for name in parameters if name not in self._parameters)
        misfits = [
            f"{name}: expected {tuple(mine.shape)} {self.dtype}, got {_outline(parameters[name])}"
            for name, mine in self._parameters.items()
            if name in parameters and _outline(parameters[name]) != f"{tuple(mine.shape)} {self.dtype}"
        ]
        faults = [
            f"{what} {_listed(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names
        ]
        if faults or misfits:
            raise CheckpointError(f"parameters do not fit {type(self).__name__}: {'; '.join([*faults, *misfits])}")

    def _expect_here(self, parameters: Mapping[str, Array]) -> None:
        for name, x in parameters.items():
            place = place_of({name: x})
            if place.backend is not self._place.backend or place.device not in (None, self._place.device):
                raise BackendMismatchError(
                    f"{name}: expected an array of {self._place}, to which the layer is bound, got one of {place}; "
                    "convert it with polyattn.to_backend, or copy it in with load_parameters"
                )

    # ---- the stairs -------------------------------------------------------------------------------------------

    def _call(self, inputs: Mapping[str, Array | None], static: dict[str, Any]) -> Array:
        return self._operation.evaluate(self._embark(inputs), static, self._arguments())

    def _record(self, inputs: Mapping[str, Array | None], static: dict[str, Any]) -> tuple[Array, Cache]:
        return self._operation.remember(self._embark(inputs), static, self._arguments())

    def _pull(
        self, dy: Array, cache: Cache, names: Sequence[str], *, inputs: bool = True
    ) -> tuple[list[Array | None], dict[str, Array]]:
        """Return the gradients of the inputs called ``names``, at home, and of the parameters, where those are."""
        grads = self._operation.reverse(dy, cache, inputs=inputs)
        dinputs, dparameters = grads[: len(names)], grads[len(grads) - len(self._slots) :]
        home = [
            None if dx is None else move(dx, cache.home, name=f"d{name}")
            for name, dx in zip(names, dinputs, strict=True)
        ]
        slots = zip(self._slots, dparameters, strict=True)
        return home, {name: dparameter for name, dparameter in slots if dparameter is not None}

    def _arguments(self) -> tuple[Array | None, ...]:
        return tuple(self._parameters.get(name) for name in self._slots)

    def _embark(self, inputs: Mapping[str, Array | None]) -> Trip:
        remedy = "bind it to a backend with layer.to({!r}, device=None)"
        return embark_for(Bound(self._place, self._moves_inputs), inputs, "layer", remedy)

    def _expect_dtype(self, **inputs: Array | None) -> None:
        expect_dtype(self.dtype, "the layer's", **inputs)

    def _of_width(self, x: Array, features: int) -> dict[str, Array | None]:
        """Return x (…, features) as a layer's one input, or raise what is wrong with it."""
        self._expect_dtype(x=x)
        expect_rank("x", x, 1)
        if x.shape[-1] != features:
            raise ShapeError(f"x: expected (…, {features}), got {tuple(x.shape)}")
        return {"x": x}


def _listed(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _outline(x: Any) -> str:
    return f"{tuple(x.shape)} {dtype_name(x.dtype)}" if registry.looks_like_array(x) else type(x).__name__


def _created(x: np.ndarray[Any, Any], dtype: str, place: Place) -> Array:
    """Return initial values on a backend, rounded on the host where NumPy has the dtype, so that all have the same."""
    target = place.backend.dtype(dtype)
    host = x.astype("float32" if dtype == "bfloat16" else dtype, order="C")
    native = place.backend.asarray(host, place.device, None)
    return native if dtype != "bfloat16" else place.backend.namespace().astype(native, target)
