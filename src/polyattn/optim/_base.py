"""What the optimisers share: the walk over the parameters, and what is checked before it.

An optimiser is a frozen dataclass over :class:`Optimizer` that says which slots
it keeps and what one update does with the arrays of one parameter.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import array_api_compat
import numpy as np

from .. import registry
from ..errors import ArgumentError, BackendMismatchError, CheckpointError, DTypeError, ShapeError
from ..kernels import FLOAT_DTYPES, Array, dtype_name, wide

Rate = float | Callable[[Any], Any]
"""A learning rate: a number, or a function of the number of updates already done."""

Arrays = Mapping[str, Array]


class Optimizer:
    """The ``init`` and ``update`` of every optimiser."""

    lr: Rate

    def init(self, params: Arrays) -> dict[str, Array]:
        """Return the state before the first update, on the parameters' library and device.

        Raises
        ------
        DTypeError
            If a parameter is not a floating array.
        BackendMismatchError
            If the parameters are of several libraries or devices.
        CheckpointError
            If ``params`` is no dict, or there are no parameters.
        """
        xp, home = common_namespace(params=params)
        check_floating("params", params)
        state = {"step": xp.asarray(0, dtype=xp.int32, device=home)}
        for name, param in params.items():
            for slot in self._slots():
                state[f"{slot}.{name}"] = xp.zeros_like(param, dtype=wide(xp, param.dtype), device=device(param))
        return state

    def update(self, grads: Arrays, state: Arrays, params: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the parameters and the state after one update; nothing that was passed in is changed or shared.

        Parameters
        ----------
        grads : dict
            A gradient for each parameter, under its name and in its shape, of any floating dtype.
        state : dict
            What :meth:`init` or the last update returned.
        params : dict
            The parameters by name.

        Raises
        ------
        CheckpointError
            If one of the three is no dict, or their names do not belong together, or there are none.
        ShapeError, DTypeError
            If the shape or dtype of an array does not fit; the message names it.
        BackendMismatchError
            If the arrays are of several libraries or devices.
        """
        xp, home = self._check(grads, state, params)
        widest = widest_dtype(xp, params)
        new_params, new_state = {}, {"step": as_array(state["step"] + 1, xp)}
        with np.errstate(all="ignore"):  # as in the operations: what is not finite stays so, without a warning
            done = as_array(xp.astype(state["step"], widest), xp)
            rate = rate_array(self.lr(done) if callable(self.lr) else self.lr, xp, widest, home)
            scalars = self._scalars(rate, done + 1.0, xp)
            for name, param in params.items():
                dtype = wide(xp, param.dtype)
                slots = [state[f"{slot}.{name}"] for slot in self._slots()]
                arrays = [_in(dtype, x, xp) for x in (param, grads[name], *slots, *scalars)]
                theta, *slots = self._rule(*arrays, xp=xp)
                new_params[name] = as_array(_in(param.dtype, theta, xp), xp)
                for slot, value in zip(self._slots(), slots, strict=True):
                    new_state[f"{slot}.{name}"] = as_array(value, xp)
        return new_params, new_state

    def _slots(self) -> tuple[str, ...]:
        """Return the names of the arrays that are kept for each parameter."""
        raise NotImplementedError

    def _scalars(self, rate: Array, t: Array, xp: Any) -> tuple[Array, ...]:
        """Return the 0-d arrays that the rule takes at the update number ``t``, the same for every parameter."""
        return (rate,)

    def _rule(self, theta: Array, grad: Array, *rest: Array, xp: Any) -> tuple[Array, ...]:
        """Return new arrays ``(theta, *slots)`` from ``theta, grad, *slots, *scalars``, all of one dtype."""
        raise NotImplementedError

    def _check(self, grads: Arrays, state: Arrays, params: Arrays) -> tuple[Any, Any]:
        """Check that the three dicts fit together; return their namespace and device."""
        _expect_dicts(grads=grads, state=state, params=params)
        _check_names("grads", grads, params)
        _check_names("state", state, ["step", *(f"{slot}.{name}" for slot in self._slots() for name in params)])
        xp, home = common_namespace(params=params, grads=grads, state=state)
        check_floating("params", params)
        check_floating("grads", grads)
        _check_array("state", state, "step", (), xp.int32)
        for name, param in params.items():
            _check_array("grads", grads, name, param.shape)
            for slot in self._slots():
                _check_array("state", state, f"{slot}.{name}", param.shape, wide(xp, param.dtype))
        return xp, home


def set_number(instance: object, argument: str, below: float = math.inf) -> None:
    """Check that a field of a frozen dataclass is a number in [0, below), and make it a Python float.

    NumPy's float64 is a float too, but one that would widen float32 arrays.
    """
    object.__setattr__(instance, argument, check_number(argument, getattr(instance, argument), below))


def set_rate(instance: object, argument: str) -> None:
    """Check that a field of a frozen dataclass is a number of at least zero or a function of the step."""
    if not callable(getattr(instance, argument)):
        set_number(instance, argument)


def check_number(argument: str, value: object, below: float = math.inf) -> float:
    """Return ``value`` as a float if it is a number in [0, below); NaN is not."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < below:
        return float(value)
    upper = f" and below {below:g}" if below < math.inf else ""
    raise ArgumentError(f"{argument}: expected a finite number of at least 0{upper}, got {value!r}")


def widest_dtype(xp: Any, arrays: Arrays) -> Any:
    """Return the dtype of arithmetic over all arrays: float64 where one of them is, else float32."""
    return xp.float64 if any(dtype_name(x.dtype) == "float64" for x in arrays.values()) else xp.float32


def _in(dtype: Any, x: Array, xp: Any) -> Array:
    """Return ``x`` in a dtype; most have it, and asking is quicker than a cast that does nothing."""
    return x if x.dtype == dtype else xp.astype(x, dtype)


def as_array(x: Any, xp: Any) -> Array:
    """Return ``x`` as an array: NumPy's arithmetic makes scalars of 0-d arrays."""
    return xp.asarray(x, dtype=x.dtype, device=device(x)) if x.ndim == 0 else x


def namespace(x: Array) -> Any:
    """Return the functions of the standard for an array's library: its plugin's, which may have had to add to them."""
    return registry.owner(x).namespace()


def device(x: Array) -> Any:
    """Return an array's device as ``device=`` takes it; a plugin knows it where the array does not say."""
    try:
        return array_api_compat.device(x)
    except AttributeError:
        owner = registry.owner(x)
        return owner.native_device(owner.device_of(x))


def rate_array(value: Any, xp: Any, dtype: Any, home: Any) -> Array:
    """Return a rate that is a number or a 0-d array, as a 0-d array of ``dtype``."""
    if isinstance(value, numbers.Real):
        return xp.asarray(check_number("lr", value), dtype=dtype, device=home)
    expected = "a function that returns a number or a 0-d array of the parameters' library"
    if not _is_array(value) or namespace(value) is not xp:
        raise BackendMismatchError(f"lr: expected {expected}, got {_library(value)}")
    if value.shape != ():
        raise ShapeError(f"lr: expected {expected}, got shape {tuple(value.shape)}")
    return xp.astype(value, dtype, copy=False)


def common_namespace(**groups: Arrays) -> tuple[Any, Any]:
    """Return the namespace and device of all arrays in the named dicts, which must be the same for all."""
    _expect_dicts(**groups)
    everything = [x for group in groups.values() for x in group.values()]
    for label, x in _labelled(groups):
        if not _is_array(x):
            raise DTypeError(f"{label}: expected an array, got {_library(x)}")
    if not everything:
        raise CheckpointError(f"{next(iter(groups))}: expected a dict with at least one array, got an empty one")
    xp = namespace(everything[0])
    if any(namespace(x) is not xp for x in everything):
        raise BackendMismatchError(f"expected arrays of one library, got {_first_of_each(groups, _library)}")
    home = device(everything[0])
    if array_api_compat.is_jax_array(everything[0]):
        # JAX checks for itself: traced arrays have no device yet, and an array may be spread over several,
        # in a way that does not suit the 0-d arrays that are put beside it.
        return xp, None if hasattr(home, "device_set") else home
    if any(device(x) != home for x in everything):
        raise BackendMismatchError(f"expected arrays on one device, got {_first_of_each(groups, device)}")
    return xp, home


def _expect_dicts(**groups: Arrays) -> None:
    for group, arrays in groups.items():
        if not isinstance(arrays, Mapping):
            raise CheckpointError(f"{group}: expected a dict of arrays by name, got {type(arrays).__name__}")


def check_floating(group: str, arrays: Arrays) -> None:
    """Raise DTypeError for the first array that is not of a real floating dtype."""
    for name, x in arrays.items():
        if dtype_name(x.dtype) not in FLOAT_DTYPES:
            expected = ", ".join(FLOAT_DTYPES)
            raise DTypeError(f"{group}[{name!r}]: expected one of {expected}, got {dtype_name(x.dtype)}")


def _check_names(group: str, arrays: Arrays, expected: Iterable[str]) -> None:
    names = set(expected)
    missing, unexpected = sorted(names - set(arrays)), sorted(set(arrays) - names)
    if missing or unexpected:
        got = f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}"
        raise CheckpointError(f"{group}: expected the names that belong to params, got {got}")


def _check_array(group: str, arrays: Arrays, name: str, shape: tuple[int, ...], dtype: Any = None) -> None:
    x = arrays[name]
    if x.shape != shape:
        raise ShapeError(f"{group}[{name!r}]: expected shape {tuple(shape)}, got {tuple(x.shape)}")
    if dtype is not None and x.dtype != dtype:
        raise DTypeError(f"{group}[{name!r}]: expected {dtype_name(dtype)}, got {dtype_name(x.dtype)}")


def _is_array(x: object) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _labelled(groups: Mapping[str, Arrays]) -> Iterator[tuple[str, Any]]:
    for group, arrays in groups.items():
        for name, x in arrays.items():
            yield f"{group}[{name!r}]", x


def _first_of_each(groups: Mapping[str, Arrays], describe: Callable[[Any], object]) -> str:
    """Name the first array of each library or device: enough to see what was mixed."""
    found: dict[str, str] = {}
    for label, x in _labelled(groups):
        found.setdefault(str(describe(x)), label)
    return ", ".join(f"{label}: {what}" for what, label in found.items())


def _library(x: object) -> str:
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]} {kind.__name__}"
