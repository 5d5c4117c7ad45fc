"""One array library, as polyattn sees it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from ..errors import DTypeError
from ..kernels import Array, Kernel

__all__ = ["API_VERSION", "READY", "ArrayState", "Backend", "Status"]

API_VERSION = 2
"""The version of this contract. A plugin that names another one is reported as broken, with what to change."""


@dataclass(frozen=True)
class Status:
    """Whether a backend can be used here.

    ``state`` is ``"ready"``; ``"not installed"`` where the library is missing;
    ``"unavailable"`` where it is there and cannot be used. ``reason`` and
    ``install`` (the exact command) are for people; ``version`` is the library's.
    """

    state: Literal["ready", "not installed", "unavailable"]
    version: str = ""
    reason: str = ""
    install: str = ""


class ArrayState(NamedTuple):
    """What can be done with an array besides computing with it."""

    unusable: str | None = None
    """Why polyattn cannot compute with it ("is masked", "is sparse"), or None."""
    captive: str | None = None
    """Why it may not leave its library ("is being traced", "requires gradients"), or None."""
    readable: bool = True
    """Whether its values can be read without waiting for a device or breaking a trace."""


READY = ArrayState()


class Backend:
    """One array library, as polyattn sees it. Subclass it, and give an instance to the entry point."""

    # ---- what every plugin says ------------------------------------------------------------------------------

    name: str
    """The name under which users select it; compared without case, ``-`` and ``_`` alike."""
    api_version: int = API_VERSION
    array_modules: tuple[str, ...]
    """Modules of the library's array types, ``("torch",)`` for instance; the first is the one to import.

    Where that is a part of a package, ``("dask.array", "dask")``, the package follows it.
    """
    install: str = ""
    """The exact command that installs the library."""
    lacks: ClassVar[Mapping[str, str]] = {}
    """Which features of :data:`polyattn.backend.FEATURES` the library has not, each with the reason.

    One that neither the library nor an unused hook tells of belongs here; of the others it may say why. The
    conformance kit fails where the library has what is declared lacking, or lacks what is not.
    """
    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Which checks of the conformance kit the library is known to fail, each with the reason; one that passes fails."""

    def status(self) -> Status:
        """Say whether the library can be used here: it is there, and importing it goes well. It must not raise."""
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

        Names are shared between libraries, so that a device can be kept when an
        array changes library: ``"cpu"`` is the host, ``"cuda:0"`` the first CUDA device.
        """
        return ("cpu",)

    def namespace(self) -> Any:
        """Return the library's array API namespace (``array_api_compat.torch`` for instance)."""
        raise NotImplementedError

    def owns(self, x: object) -> bool:
        """Say whether ``x`` is an array of this library. Called only once one of ``array_modules`` is imported."""
        raise NotImplementedError

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Return ``x`` as an array of this library on ``device``.

        ``x`` is an array of this library, a NumPy array for which :meth:`shares`
        is true, or an array on a device that both libraries address. ``copy`` is
        the standard's: True always, False never (ValueError where it cannot be
        avoided), None where it must.
        """
        raise NotImplementedError

    def device_of(self, x: Array) -> str | None:
        """Return the name of the device that holds ``x``, as :meth:`devices` spells it; None where a trace hides it."""
        return "cpu"

    def native_device(self, device: str | None) -> Any:
        """Return the library's own object for a device name; None is the default device."""
        return None

    # ---- conversion hooks ------------------------------------------------------------------------------------

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Return ``x`` on the host, without a copy where it lies there; it may be read-only."""
        return np.asarray(np.from_dlpack(x))

    def shares(self, x: Array) -> bool:
        """Say whether ``x`` crosses between this library and NumPy without a copy.

        ``x`` is an array of this library, whose memory :meth:`to_numpy` would show, or a NumPy array, whose memory
        :meth:`asarray` would use. A NumPy array for which this is false is handed over as a packed copy.
        """
        if isinstance(x, np.ndarray):
            return x.flags.c_contiguous and x.flags.aligned and x.flags.writeable and x.dtype.isnative
        return self.device_of(x) == "cpu"

    def dtype(self, name: str) -> Any:
        """Return the library's dtype of that name; :class:`DTypeError` where it has none (or has it switched off)."""
        dtype = getattr(self.namespace(), name, None)
        if dtype is None:
            raise DTypeError(f"{self.name} has no dtype {name!r}")
        return dtype

    def state(self, x: Array) -> ArrayState:
        """Say what can be done with ``x``: compute with it, take it to another library, read its values."""
        return READY

    # ---- computation hooks, each with a fallback that uses only the standard ------------------------------------

    kernels: Sequence[Kernel] = ()
    """Attention kernels, the fastest first; the generic one stands behind them."""

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which native code runs: no autograd graph is recorded, no float warning is raised."""
        return contextlib.nullcontext()

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of arrays, dicts and tuples of arrays; the fallback is the function itself."""
        return function

    def register(self, kind: type) -> None:
        """Let instances of a class cross the compiler's boundary; the fallback compiles nothing.

        ``x.flattened()`` gives the arrays of an instance and a structure, which can be hashed and compared and has the
        ``names`` of the arrays; ``kind.unflattened(structure, arrays)`` gives an instance.
        """

    def by_rows(self, function: Callable[..., Any], *arrays: Array, axes: int = 1) -> Any:
        """Return ``function(*arrays)``, of a function that treats every row for itself: the last ``axes`` axes.

        The arrays have their other axes in common, and so has the result, an array or a tuple of them. So a
        backend may give it some rows at a time.
        """
        return function(*arrays)

    def scan(self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, length: int) -> tuple[Any, Any]:
        """Run ``carry, y = body(carry, i)`` for each i below ``length`` (at least 1), as ``jax.lax.scan`` does.

        ``y`` is a tuple of arrays. Return the last carry, and the y's stacked along a new first axis.
        """
        outputs = []
        for index in range(length):
            carry, output = body(carry, index)
            outputs.append(output)
        return carry, tuple(self.namespace().stack(column) for column in zip(*outputs, strict=True))

    def cond(self, predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """Return the result of one of two functions, chosen by a 0-d boolean array."""
        return if_true() if bool(predicate) else if_false()

    def update_slice(self, x: Array, value: Array, start: int | Array, axis: int) -> Array:
        """Return ``x`` with ``value`` written from ``start`` on along ``axis``; ``x`` may be reused for it.

        A one-dimensional ``start``, of NumPy's integers or traced, has one for each entry of the first axis. This
        method writes those one by one, and returns ``x`` itself where each was written in place.
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
        """Return ``x`` with ``value[i]`` added to row ``index[i]``, repeated rows summed."""
        xp = self.namespace()
        rows = xp.arange(x.shape[0], dtype=index.dtype, device=self.native_device(self.device_of(x)))
        chosen = xp.astype(xp.equal(rows[:, None], index[None, :]), x.dtype)  # (rows, n)
        flat = xp.reshape(value, (value.shape[0], math.prod(value.shape[1:])))
        return xp.add(x, xp.reshape(xp.matmul(chosen, flat), x.shape))

    def differentiable(
        self, forward: Callable[..., tuple[Array, Any]], backward: Callable[[Array, Any], tuple[Any, ...]]
    ) -> Callable[..., Array] | None:
        """Return ``y = op(*arrays)`` that the library's own differentiation can go through.

        ``forward(*arrays)`` gives ``(y, saved)`` with ``saved`` a record, of which :func:`polyattn.backend.flatten`
        gives the arrays; ``backward(dy, saved)`` gives a gradient or None for each array. Both are to be run in
        :meth:`scope`. The fallback, None, is for a library that does not differentiate.
        """
        return None

    def synchronize(self, *arrays: Array) -> None:
        """Wait until the arrays are computed. The fallback is for libraries that compute at once."""
