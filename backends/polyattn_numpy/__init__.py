"""NumPy as a polyattn backend: the CPU, with the BLAS of the installed NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from polyattn.backend import READY, Array, ArrayState, Backend, DTypeError, silenced
from polyattn_native import NativeKernel, note, operation

from ._blocked_kernel import BlockedKernel
from ._direct import DirectKernel
from ._pieces import in_pieces

__all__ = ["backend"]


class NumpyBackend(Backend):
    """NumPy arrays, scalars (its 0-d results) and memory maps."""

    name = "numpy"
    array_modules = ("numpy",)
    kernels = (NativeKernel(), DirectKernel(), BlockedKernel())
    lacks: ClassVar[Mapping[str, str]] = {
        "devices": "NumPy's arrays lie on the host",
        **dict.fromkeys(("autograd", "second_order", "forward_mode"), "NumPy does not differentiate, polyattn does"),
        "vmap": "NumPy has none; leading axes are batches",
        **dict.fromkeys(("jit", "scan"), "NumPy compiles nothing"),
    }
    scope = staticmethod(silenced)
    operation = staticmethod(operation)

    def namespace(self) -> Any:
        """Return array-api-compat's NumPy, the same for every NumPy 2."""
        import array_api_compat.numpy as xp

        return xp

    def owns(self, x: object) -> bool:
        """Recognise ndarray with its subclasses, and NumPy's scalars."""
        return isinstance(x, np.ndarray | np.generic)

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Return a NumPy array; dispatch passes only arrays in host memory."""
        return np.asarray(x, copy=copy)

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Return the array itself; a scalar becomes a 0-d array."""
        return np.asarray(x)

    def shares(self, x: Array) -> bool:
        """Share any writable array in which no two elements have the same address; a scalar is copied to an array."""
        if not isinstance(x, np.ndarray):
            return False
        apart = all(s != 0 or n <= 1 for n, s in zip(x.shape, x.strides, strict=True))
        return apart and x.flags.writeable and x.dtype.isnative

    def state(self, x: Array) -> ArrayState:
        """Refuse masked arrays and ``numpy.matrix``, which have different arithmetic."""
        if type(x) is np.ndarray:
            return READY
        if isinstance(x, np.ma.MaskedArray):
            return ArrayState(unusable="is masked (give its data, and mask= to attention)")
        return ArrayState("is a matrix (numpy.asarray makes an array of it)") if isinstance(x, np.matrix) else READY

    def dtype(self, name: str) -> Any:
        """Return NumPy's dtype, or ml_dtypes' bfloat16, which NumPy itself lacks."""
        if name == "bfloat16":
            try:
                import ml_dtypes
            except ImportError as error:
                raise DTypeError("numpy has bfloat16 only with ml_dtypes: pip install ml_dtypes") from error
            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(super().dtype(name))

    def notes(self, device: str | None = None) -> tuple[str, ...]:
        """Say which native kernels there are."""
        return (note("numpy"),)

    def by_rows(self, function: Callable[..., Any], *arrays: Array, axes: int = 1) -> Any:
        """Apply the function to large arrays in pieces, on several threads."""
        return in_pieces(function, arrays, axes)

    def update_slice(self, x: Array, value: Array, start: int | Array, axis: int) -> Array:
        """Write into ``x`` itself."""
        if getattr(start, "ndim", 0) == 1:
            return super().update_slice(x, value, start, axis)
        x[(*(slice(None),) * (axis % x.ndim), slice(start, start + value.shape[axis]))] = value
        return x

    def index_add(self, x: Array, index: Array, value: Array) -> Array:
        """Use NumPy's unbuffered addition, which sums repeated rows."""
        result = x.copy()
        np.add.at(result, index, value)
        return result


backend = NumpyBackend()
