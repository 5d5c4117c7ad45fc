"""The base class of the optimisers: the loop over the parameters, and the checks before it.

An optimiser is a frozen dataclass that derives from :class:`Optimizer` and defines
its slots and the update of one parameter.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .. import registry
from ..backend import Array, Backend, dtype_name, silenced
from ..conversion import place_of
from ..errors import ArgumentError, BackendMismatchError, CheckpointError, DTypeError, ShapeError
from ..functional._checks import expect_arrays, expect_dtype, expect_floating, expect_shape, is_number
from ..kernels import wide

Rate = float | Callable[[Any], Any]
"""A learning rate: a number, or a function of the number of updates so far."""

Arrays = Mapping[str, Array]


class Optimizer:
    """The ``init`` and ``update`` of every optimiser."""

    lr: Rate

    def init(self, params: Arrays) -> dict[str, Array]:
        """Return the state before the first update, on the library and device of the parameters.

        Raises
        ------
        DTypeError
            If a parameter is not a floating array.
        BackendMismatchError
            If the parameters are of several libraries or devices.
        CheckpointError
            If ``params`` is no dict, or there are no parameters.
        """
        backend, device = common_place(params=params)
        expect_floating(**labelled(params=params))
        xp = backend.namespace()
        state = {"step": xp.zeros((), dtype=xp.int32, device=device)}
        for name, param in params.items():
            for slot in self._slots():
                state[f"{slot}.{name}"] = xp.zeros_like(param, dtype=wide(xp, param.dtype))
        return state

    def update(self, grads: Arrays, state: Arrays, params: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return new parameters and a new state after one update; the inputs are not modified.

        Parameters
        ----------
        grads : dict
            A gradient for each parameter, with its name and shape, of any floating dtype.
        state : dict
            The state from :meth:`init` or the previous update.
        params : dict
            The parameters by name.

        Raises
        ------
        CheckpointError
            If an argument is no dict, the names do not match, or there are no parameters.
        ShapeError, DTypeError
            If the shape or dtype of an array does not fit; the message names it.
        BackendMismatchError
            If the arrays are of several libraries or devices.
        """
        backend = self._check(grads, state, params)
        xp = backend.namespace()
        widest = widest_dtype(xp, params)
        new_params, new_state = {}, {"step": as_array(_next(state["step"], xp), xp)}
        with silenced():  # as in the operations, inf and NaN give no warning
            done = as_array(xp.astype(state["step"], widest), xp)
            rate = rate_array(self.lr(done) if callable(self.lr) else self.lr, done, xp)
            scalars = self._scalars(rate, done + 1.0, xp)
            for name, param in params.items():
                dtype = wide(xp, param.dtype)
                slots = [state[f"{slot}.{name}"] for slot in self._slots()]
                arrays = [_as_dtype(dtype, x, xp) for x in (param, grads[name], *slots, *scalars)]
                theta, *slots = self._rule(*arrays, backend=backend)
                new_params[name] = as_array(_as_dtype(param.dtype, theta, xp), xp)
                for slot, value in zip(self._slots(), slots, strict=True):
                    new_state[f"{slot}.{name}"] = as_array(value, xp)
        return new_params, new_state

    def _slots(self) -> tuple[str, ...]:
        """Return the names of the state arrays of each parameter."""
        raise NotImplementedError

    def _scalars(self, rate: Array, t: Array, xp: Any) -> tuple[Array, ...]:
        """Return the 0-d arrays that the rule takes at update ``t``, the same for every parameter."""
        return (rate,)

    def _rule(self, theta: Array, grad: Array, *rest: Array, backend: Backend) -> tuple[Array, ...]:
        """Return new arrays ``(theta, *slots)`` from ``theta, grad, *slots, *scalars``, all of one dtype."""
        raise NotImplementedError

    def _check(self, grads: Arrays, state: Arrays, params: Arrays) -> Backend:
        """Check that the three dicts fit together; return their backend."""
        _expect_dicts(grads=grads, state=state, params=params)
        _expect_names("grads", grads, params)
        _expect_names("state", state, ["step", *(f"{slot}.{name}" for slot in self._slots() for name in params)])
        backend, _ = common_place(params=params, grads=grads, state=state)
        expect_floating(**labelled(params=params, grads=grads))
        expect_shape("state['step']", state["step"], ())
        if dtype_name(state["step"].dtype) != "int32":
            raise DTypeError(f"state['step']: expected int32, got {dtype_name(state['step'].dtype)}")
        xp = backend.namespace()
        for name, param in params.items():
            expect_shape(f"grads[{name!r}]", grads[name], param.shape)
            dtype = dtype_name(wide(xp, param.dtype))
            for slot in self._slots():
                label, x = f"state['{slot}.{name}']", state[f"{slot}.{name}"]
                expect_shape(label, x, param.shape)
                expect_dtype(dtype, "the arithmetic's", **{label: x})
        return backend


def set_number(instance: object, argument: str, below: float = math.inf) -> None:
    """Check that a field of a frozen dataclass is a number in [0, below), and make it a Python float.

    NumPy's float64 is a subclass of float, but would promote float32 arrays.
    """
    object.__setattr__(instance, argument, check_number(argument, getattr(instance, argument), below))


def set_rate(instance: object, argument: str) -> None:
    """Check that a field of a frozen dataclass is a number of at least zero or a function of the step."""
    if not callable(getattr(instance, argument)):
        set_number(instance, argument)


def check_number(argument: str, value: Any, below: float = math.inf) -> float:
    """Return ``value`` as a float, or raise unless it is a number in [0, below)."""
    if is_number(value) and 0 <= value < below:
        return float(value)
    upper = f" and below {below:g}" if below < math.inf else ""
    raise ArgumentError(f"{argument}: expected a finite number of at least 0{upper}, got {value!r}")


def widest_dtype(xp: Any, arrays: Arrays) -> Any:
    """Return the dtype of arithmetic over all arrays: float64 if one of them is float64, else float32."""
    return xp.float64 if any(dtype_name(x.dtype) == "float64" for x in arrays.values()) else xp.float32


def _as_dtype(dtype: Any, x: Array, xp: Any) -> Array:
    """Return ``x`` in a dtype; the comparison is cheaper than a cast to the same dtype."""
    return x if x.dtype == dtype else xp.astype(x, dtype)


def _next(step: Array, xp: Any) -> Array:
    """Return the number of updates plus one; it saturates at the largest int32."""
    return xp.where(xp.less(step, xp.full_like(step, 2**31 - 1)), step + 1, step)


def as_array(x: Any, xp: Any) -> Array:
    """Return ``x`` as an array: NumPy's arithmetic on 0-d arrays returns scalars."""
    return xp.asarray(x) if x.ndim == 0 else x


def rate_array(value: Any, like: Array, xp: Any) -> Array:
    """Return a rate, a number or a 0-d array, as a 0-d array of the dtype and device of ``like``."""
    if isinstance(value, numbers.Real):
        return xp.full_like(like, check_number("lr", value))
    expected = "a function that returns a number or a 0-d array of the parameters' library"
    if not registry.looks_like_array(value) or registry.owner(value, "lr").namespace() is not xp:
        raise BackendMismatchError(f"lr: expected {expected}, got {type(value).__module__} {type(value).__name__}")
    if value.shape != ():
        raise ShapeError(f"lr: expected {expected}, got shape {tuple(value.shape)}")
    return xp.astype(value, like.dtype, copy=False)


def labelled(**groups: Arrays) -> dict[str, Array]:
    """Return the arrays of the named dicts under their names in error messages, such as ``params['weight']``."""
    return {f"{group}[{name!r}]": x for group, arrays in groups.items() for name, x in arrays.items()}


def common_place(**groups: Arrays) -> tuple[Backend, Any]:
    """Return the common backend of the arrays in the named dicts, and the library's object for their device.

    The device is None, the library's default, if an array is traced or sharded over several devices.
    """
    _expect_dicts(**groups)
    arrays = labelled(**groups)
    if not arrays:
        raise CheckpointError(f"{next(iter(groups))}: expected a dict with at least one array, got an empty one")
    expect_arrays(**arrays)
    backend, device = place_of(arrays)
    known = all(backend.device_of(x) is not None for x in arrays.values())
    return backend, backend.native_device(device) if known else None


def _expect_dicts(**groups: Arrays) -> None:
    for group, arrays in groups.items():
        if not isinstance(arrays, Mapping):
            raise CheckpointError(f"{group}: expected a dict of arrays by name, got {type(arrays).__name__}")


def _expect_names(group: str, arrays: Arrays, expected: Iterable[str]) -> None:
    names = set(expected)
    missing, unexpected = sorted(names - set(arrays)), sorted(set(arrays) - names)
    if missing or unexpected:
        got = f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}"
        raise CheckpointError(f"{group}: expected the names that belong to params, got {got}")
