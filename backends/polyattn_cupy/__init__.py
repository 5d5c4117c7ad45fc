"""CuPy as a polyattn backend: CUDA devices, on the current stream of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from polyattn.backend import Array, ArrayState, Backend, Status

from ._kernel import CublasKernel

__all__ = ["backend"]

ON_DEVICE = ArrayState(readable=False)


class CupyBackend(Backend):
    """CuPy arrays. CuPy can be imported without a GPU and fails at the first array, so ``status`` counts devices."""

    name = "cupy"
    array_modules = ("cupy",)
    install = 'pip install "polyattn[cuda13x]"   (or [cuda12x], to match the CUDA driver)'
    kernels = (CublasKernel(),)
    lacks: ClassVar[Mapping[str, str]] = {
        "shared_memory": "a CUDA device has memory of its own",
        "values": "to look at them is to wait for the device",
        **dict.fromkeys(("autograd", "second_order", "forward_mode"), "CuPy does not differentiate, polyattn does"),
        "vmap": "CuPy has none; leading axes are batches",
        **dict.fromkeys(("jit", "scan"), "CuPy runs each operation as it comes"),
    }

    def status(self) -> Status:
        """Import CuPy and count the CUDA devices."""
        status = super().status()
        if status.state != "ready":
            return status
        import cupy

        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return Status("unavailable", status.version, f"no CUDA device ({error})")
        return status if count else Status("unavailable", status.version, "no CUDA device")

    def devices(self) -> tuple[str, ...]:
        """List the CUDA devices, the current one first."""
        import cupy

        current = cupy.cuda.runtime.getDevice()
        indices = sorted(range(cupy.cuda.runtime.getDeviceCount()), key=lambda i: i != current)
        return tuple(f"cuda:{i}" for i in indices)

    def namespace(self) -> Any:
        """Return array-api-compat's CuPy."""
        import array_api_compat.cupy as xp

        return xp

    def owns(self, x: object) -> bool:
        """Recognise CuPy's ndarray."""
        import cupy

        return isinstance(x, cupy.ndarray)

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Convert a CuPy array, a NumPy array (copied to the device), or another library's CUDA array."""
        import cupy

        target = self.native_device(device) or cupy.cuda.Device()
        if isinstance(x, cupy.ndarray | np.ndarray):
            here = isinstance(x, cupy.ndarray) and x.device == target
            if copy is False and not here:
                raise ValueError(f"this array cannot reach cuda:{target.id} without a copy")
            with target:
                return cupy.array(x, copy=True) if copy or not here else x
        with target:
            shared = cupy.from_dlpack(x)
            return shared.copy() if copy else shared

    def device_of(self, x: Array) -> str:
        """Return ``cuda:N``."""
        return f"cuda:{x.device.id}"

    def native_device(self, device: str | None) -> Any:
        """Return a ``cupy.cuda.Device``."""
        import cupy

        return None if device is None else cupy.cuda.Device(int(device.partition(":")[2] or 0))

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Copy to the host and wait for the copy."""
        return np.asarray(x.get())

    def shares(self, x: Array) -> bool:
        """Accept a NumPy array of any layout: it is copied to the device in any case."""
        return isinstance(x, np.ndarray) and bool(x.dtype.isnative)

    def state(self, x: Array) -> ArrayState:
        """Declare the values unreadable: reading them would wait for the device."""
        return ON_DEVICE

    def index_add(self, x: Array, index: Array, value: Array) -> Array:
        """Use CuPy's atomic addition."""
        import cupyx

        result = x.copy()
        cupyx.scatter_add(result, index, value)
        return result

    def update_slice(self, x: Array, value: Array, start: int | Array, axis: int) -> Array:
        """Write into ``x`` itself."""
        if getattr(start, "ndim", 0) == 1:
            return super().update_slice(x, value, start, axis)
        x[(*(slice(None),) * (axis % x.ndim), slice(start, start + value.shape[axis]))] = value
        return x

    def synchronize(self, *arrays: Array) -> None:
        """Wait for the current stream of each array's device."""
        for x in arrays:
            with x.device as device:
                device.synchronize()


backend = CupyBackend()
