"""The contract between polyattn and an array library."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from ..errors import DTypeError
from ..kernels import Array, Kernel
from ..kernels._exclusion import matmul_excluding

__all__ = ["API_VERSION", "READY", "ArrayState", "Backend", "Status"]

Result = TypeVar("Result")

API_VERSION = 2
"""The version of this contract. A plugin of another version is reported as broken, with the changes to make."""


@dataclass(frozen=True)
class Status:
    """Whether a backend can be used here.

    ``state`` is ``"ready"``, ``"not installed"`` if the library is missing, or
    ``"unavailable"`` if it is installed and cannot be used. ``reason`` and
    ``install`` (the exact command) are shown to users; ``version`` is the library's.
    """

    state: Literal["ready", "not installed", "unavailable"]
    version: str = ""
    reason: str = ""
    install: str = ""


class ArrayState(NamedTuple):
    """Whether polyattn can compute with an array, move it to another library, and read its values."""

    unusable: str | None = None
    """Why polyattn cannot compute with it ("is masked", "is sparse"), or None."""
    captive: str | None = None
    """Why it cannot be moved to another library ("is being traced", "requires gradients"), or None."""
    readable: bool = True
    """Whether its values can be read without waiting for a device or breaking a trace."""


READY = ArrayState()


class Backend:
    """The interface to one array library. A plugin's entry point is an instance of a subclass."""

    # ---- what every plugin defines ---------------------------------------------------------------------------

    name: str
    """The name by which users select it; case is ignored, and ``-`` equals ``_``."""
    api_version: int = API_VERSION
    array_modules: tuple[str, ...]
    """Modules of the library's array types, ``("torch",)`` for instance; the first one is imported.

    If that is a submodule, the package follows it: ``("dask.array", "dask")``.
    """
    install: str = ""
    """The exact command that installs the library."""
    lacks: ClassVar[Mapping[str, str]] = {}
    """The features of :data:`polyattn.backend.FEATURES` that the library lacks, each with the reason.

    A missing feature that polyattn cannot detect must be listed; for the others a reason may be given. The
    conformance kit fails if the library has a feature that is listed, or lacks one that is not.
    """
    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Checks of the conformance kit that fail on the library, each with the reason. The kit fails if one passes."""

    def status(self) -> Status:
        """Return whether the library is installed and can be imported, as a :class:`Status`. It must not raise."""
        module = self.array_modules[0]
        package = module.partition(".")[0]
        try:
            if importlib.util.find_spec(package) is None:
                return Status("not installed", reason=f"the package {package} is missing", install=self.install)
            library = importlib.import_module(module)
        except Exception as error:
            return Status("unavailable", reason=f"import {module} failed: {error}", install=self.install)
        version = getattr(library, "__version__", getattr(sys.modules[package], "__version__", ""))
        return Status("ready", version=str(version))

    def devices(self) -> tuple[str, ...]:
        """Return the devices that this process can address, the default one first.

        All libraries use the same names, so that an array can keep its device when it
        is converted: ``"cpu"`` is the host, ``"cuda:0"`` the first CUDA device.
        """
        return ("cpu",)

    def namespace(self) -> Any:
        """Return the library's array API namespace (``array_api_compat.torch`` for instance)."""
        raise NotImplementedError

    def owns(self, x: object) -> bool:
        """Return whether ``x`` is an array of this library. Called only if one of ``array_modules`` is imported."""
        raise NotImplementedError

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Return ``x`` as an array of this library on ``device``.

        ``x`` is an array of this library, a NumPy array for which :meth:`shares`
        is true, or an array on a device that both libraries address. ``copy`` is
        that of the standard: True always copies, False never (ValueError if a copy
        is needed), None copies if needed.
        """
        raise NotImplementedError

    def device_of(self, x: Array) -> str | None:
        """Return the name of the device that holds ``x``, as in :meth:`devices`; None if it is unknown in a trace."""
        return "cpu"

    def native_device(self, device: str | None) -> Any:
        """Return the library's own object for a device name; None is the default device."""
        return None

    # ---- conversion hooks ------------------------------------------------------------------------------------

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Return ``x`` as a NumPy array, without a copy if it is on the host; it may be read-only."""
        return np.asarray(np.from_dlpack(x))

    def shares(self, x: Array) -> bool:
        """Return whether ``x`` is converted between this library and NumPy without a copy.

        ``x`` is an array of this library, to be converted by :meth:`to_numpy`, or a NumPy array, to be converted by
        :meth:`asarray`. If this is false for a NumPy array, :meth:`asarray` receives a contiguous copy.
        """
        if isinstance(x, np.ndarray):
            return x.flags.c_contiguous and x.flags.aligned and x.flags.writeable and x.dtype.isnative
        return self.device_of(x) == "cpu"

    def dtype(self, name: str) -> Any:
        """Return the library's dtype of that name; raise :class:`DTypeError` if it is missing or disabled."""
        dtype = getattr(self.namespace(), name, None)
        if dtype is None:
            raise DTypeError(f"{self.name} has no dtype {name!r}")
        return dtype

    def state(self, x: Array) -> ArrayState:
        """Return whether polyattn can compute with ``x``, move it to another library, and read its values."""
        return READY

    # ---- computation hooks, each with a fallback that uses only the standard ------------------------------------

    kernels: Sequence[Kernel] = ()
    """Attention kernels, the fastest first; the generic kernels follow them."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for native code, without an autograd graph and floating-point warnings."""
        return contextlib.nullcontext()

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of arrays, dicts and tuples of arrays; the fallback returns the function itself."""
        return function

    def register(self, kind: type) -> None:
        """Allow instances of a class as arguments and results of compiled functions; the fallback does nothing.

        ``x.flattened()`` returns the arrays of an instance and a structure, which is hashable and has the ``names`` of
        the arrays; ``kind.unflattened(structure, arrays)`` returns an instance.
        """

    def by_rows(self, function: Callable[..., Any], *arrays: Array, axes: int = 1) -> Any:
        """Return ``function(*arrays)`` for a function that computes each row, the last ``axes`` axes, independently.

        The arrays have the same leading axes, as has the result, an array or a tuple of arrays. So a backend may
        call the function for some rows at a time.
        """
        return function(*arrays)

    def operation(self, name: str, *arrays: Array | None, **options: Any) -> Any:
        """Return the results of a pointwise or row operation by a kernel of the library's own, or None.

        None, the fallback, means that polyattn's formula is computed: for operations, dtypes, strides and numbers that
        the library has no kernel for. Results that overflow or lose precision are among these: the formulas keep
        intermediate results in range. The operations, with their arrays, options and results::

            gelu           x; approximate                          y
            silu           x                                       y
            geglu          gate, up; approximate                   y
            swiglu         gate, up                                y
            softmax        x; axis                                 y (float32 or float64)
            log_softmax    x; axis                                 y (float32 or float64)
            layer_norm     x, weight, bias; eps, axes              y, x̂, √(var + eps): the latter in float32 at least
            rms_norm       x, weight; eps, axes                    y, √(mean(x²) + eps)
            linear         x, weight (in, out), bias               y
            rotary         x, cos, sin (…, n, dim / 2); interleaved  y, of pairs rotated by the angles

            gelu_backward, silu_backward                dy, x; approximate               dx
            geglu_backward, swiglu_backward             dy, gate, up; approximate        dgate, dup
            softmax_backward, log_softmax_backward      dy, y; axis                      dx
            layer_norm_backward                         dy, x̂, root, weight, bias; axes  dx, dweight, dbias
            rms_norm_backward                           dy, x, root, weight; axes        dx, dweight
            linear_backward                             dy, x, weight, bias; inputs      dx, dweight, dbias

            adamw          see AdamW._rule
        """
        return None

    def scan(self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, length: int) -> tuple[Any, Any]:
        """Run ``carry, y = body(carry, i)`` for each i below ``length`` (at least 1), as ``jax.lax.scan`` does.

        ``y`` is a tuple of arrays. Return the last carry, and the y's stacked along a new first axis.
        """
        outputs = []
        for index in range(length):
            carry, output = body(carry, index)
            outputs.append(output)
        return carry, tuple(self.namespace().stack(column) for column in zip(*outputs, strict=True))

    def cond(self, predicate: Array, if_true: Callable[[], Result], if_false: Callable[[], Result]) -> Result:
        """Return the result of one of two functions, chosen by a 0-d boolean array.

        Results are arrays, tuples of them, or None.
        """
        return if_true() if bool(predicate) else if_false()

    def rounded(self, x: Array) -> Array:
        """Return ``x``, rounded to its dtype also where a compiler would contract its last product with a sum."""
        return x

    def update_slice(self, x: Array, value: Array, start: int | Array, axis: int) -> Array:
        """Return ``x`` with ``value`` written from ``start`` on along ``axis``; ``x`` may be modified and returned.

        A one-dimensional ``start``, of NumPy integers or traced, has one index for each entry of the first axis. This
        fallback writes the entries one by one, and returns ``x`` itself if all were written in place.
        """
        xp = self.namespace()
        if getattr(start, "ndim", 0) == 1:
            starts = start.tolist()  # type: ignore[union-attr]  # an array
            views = [x[i, ...] for i in range(x.shape[0])]
            rows = [
                self.update_slice(view, value[i, ...], at, axis % x.ndim - 1)
                for i, (view, at) in enumerate(zip(views, starts, strict=True))
            ]
            return x if all(row is view for row, view in zip(rows, views, strict=True)) else xp.stack(rows)
        stop = start + value.shape[axis]
        before = (slice(None),) * (axis % x.ndim)
        head, tail = x[(*before, slice(0, start), ...)], x[(*before, slice(stop, None), ...)]
        return xp.concat([head, value, tail], axis=axis)

    def index_add(self, x: Array, index: Array, value: Array) -> Array:
        """Return ``x`` with ``value[i]`` added to row ``index[i]``; an index may occur more than once."""
        xp = self.namespace()
        rows = xp.arange(x.shape[0], dtype=index.dtype, device=self.native_device(self.device_of(x)))
        chosen = xp.equal(rows[:, None], index[None, :])  # (rows, n)
        flat = xp.reshape(value, (value.shape[0], math.prod(value.shape[1:])))
        sums = matmul_excluding(self, xp.astype(chosen, x.dtype), flat, chosen)  # a NaN stays in its row
        return xp.add(x, xp.reshape(sums, x.shape))

    def follows(self, *arrays: Array | None) -> bool:
        """Return whether the library's automatic differentiation may follow any of the arrays of a call.

        If not, the forward is called alone. The fallback is true for every array if :meth:`differentiable` is defined.
        """
        return type(self).differentiable is not Backend.differentiable

    def differentiable(
        self, forward: Callable[..., tuple[Array, Any]], backward: Callable[[Array, Any], tuple[Any, ...]]
    ) -> Callable[..., Array] | None:
        """Return a function ``y = op(*arrays)`` that the library's automatic differentiation can differentiate.

        ``forward(*arrays)`` returns ``(y, saved)`` with ``saved`` a record, whose arrays
        :func:`polyattn.backend.flatten` lists; ``backward(dy, saved)`` returns a gradient or None for each array. Run
        both in :meth:`scope`. The fallback, None, is for libraries without automatic differentiation.
        """
        return None

    def notes(self, device: str | None = None) -> tuple[str, ...]:
        """Return lines for users about how the backend computes here: on a device, or on all that there are.

        Optional parts that are in use, and why others are not. It must not raise.
        """
        return ()

    def synchronize(self, *arrays: Array) -> None:
        """Wait until the arrays are computed. The fallback is for libraries that compute synchronously."""
