"""array-api-strict as a polyattn backend: it implements the array API standard and nothing more."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from polyattn.backend import Array, Backend, silenced

__all__ = ["backend"]

WHOLE = ("cpu", "device1", "device2")
# The other devices simulate libraries without 64-bit types: polyattn moves no array there, but users may.
DEVICES = {"cpu": "CPU_DEVICE"} | {name: name for name in (*WHOLE[1:], "no_float64", "no_x64")}


class StrictBackend(Backend):
    """Arrays of array-api-strict. Its simulated devices raise an error for a creation without ``device=``."""

    name = "array-api-strict"
    array_modules = ("array_api_strict",)
    install = 'pip install "polyattn[strict]"'
    lacks: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("float16", "bfloat16"), "the standard has no floats of 16 bits"),
        "in_place": "the standard promises no array that can be written to",
        **dict.fromkeys(("autograd", "second_order", "forward_mode"), "the standard does not differentiate"),
        "vmap": "the standard has none; leading axes are batches",
        **dict.fromkeys(("jit", "scan"), "the standard compiles nothing"),
        "kernels": "the referee is for the generic kernel",
    }

    def devices(self) -> tuple[str, ...]:
        """List its devices that have every dtype."""
        return WHOLE

    def namespace(self) -> Any:
        """Return the module itself."""
        import array_api_strict

        return array_api_strict

    def owns(self, x: object) -> bool:
        """Recognise its one array type."""
        return isinstance(x, type(self.namespace().empty(())))

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Convert an array of array-api-strict, or a NumPy array of a dtype of the standard."""
        xp = self.namespace()
        if self.owns(x):
            if copy is False and device != self.device_of(x):
                raise ValueError(f"an array on {self.device_of(x)} cannot reach {device} without a copy")
            y: Array = xp.asarray(x, copy=True) if copy else x
            return y.to_device(self.native_device(device)) if device else y
        if device not in (None, "cpu"):  # its memory counts as separate, like that of a real device
            if copy is False:
                raise ValueError(f"an array on cpu cannot reach {device} without a copy")
            copy = True
        return xp.asarray(x, device=self.native_device(device), copy=copy)

    def device_of(self, x: Array) -> str:
        """Return the name of the device; the default device is ``cpu``."""
        native = str(x.device)
        return next((name for name, spelt in DEVICES.items() if f"'{spelt}'" in native), native)

    def native_device(self, device: str | None) -> Any:
        """Return the ``Device`` object."""
        return None if device is None else self.namespace().Device(DEVICES[device])

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """View the memory through DLPack, which only the CPU device supports."""
        return np.asarray(np.from_dlpack(x.to_device(self.native_device("cpu"))))

    def shares(self, x: Array) -> bool:
        """Share arrays on the CPU device, and NumPy arrays that are writable and that DLPack can describe."""
        if not isinstance(x, np.ndarray):
            return self.device_of(x) == "cpu"
        axes = zip(x.shape, x.strides, strict=True)
        whole = all(s % x.itemsize == 0 and (s != 0 or n <= 1) for n, s in axes)
        return whole and x.flags.writeable and x.flags.aligned and x.dtype.isnative

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Silence the floating-point warnings of NumPy, which computes for array-api-strict."""
        return silenced()


backend = StrictBackend()
