"""JAX as a polyattn backend: eager and traced, on all devices of the default platform and on the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from polyattn.backend import (
    READY,
    Array,
    ArrayState,
    Backend,
    BackendUnavailableError,
    DTypeError,
    Status,
    dtype_name,
)
from polyattn_native import note

from ._kernel import DirectKernel, JitKernel, NativeKernel, ScanKernel

__all__ = ["backend"]

TRACED = ArrayState(captive="is being traced by JAX", readable=False)
WIDE = ("float64", "int64", "uint64", "complex128")


@functools.cache
def _library() -> Any:
    """Import JAX through ``_prepared``, which registers polyattn's pytrees once, in any number of threads."""
    from ._prepared import jax

    return jax


@functools.cache
def _jax() -> Any:
    """Return JAX, for computing; raise BackendUnavailableError where it would wait for ever."""
    from ._prepared import PROCESS, jax

    if os.getpid() != PROCESS:
        raise BackendUnavailableError(
            "jax cannot compute in a process that was forked after jax was loaded, since XLA's threads exist only in "
            'the parent; start processes by "spawn" or "forkserver" of multiprocessing, or load jax after the fork'
        )
    return jax


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_jax.cache_clear)


class JaxBackend(Backend):
    """JAX arrays and tracers. polyattn never sets JAX's flags; only the user can enable 64-bit types."""

    name = "jax"
    array_modules = ("jax", "jaxlib")
    install = 'pip install "polyattn[jax]"'
    kernels = (NativeKernel(), DirectKernel(), ScanKernel(), JitKernel())
    lacks: ClassVar[Mapping[str, str]] = {
        "shared_memory": "JAX takes only memory that begins at a multiple of 64 bytes",
        "in_place": "JAX's arrays never change; one donated to a compiled step is written where it stands",
        "any_shape": "XLA compiles each operation for each shape",
    }

    def status(self) -> Status:
        """Import JAX and list its devices, which fails if an accelerator does not work."""
        status = super().status()
        if status.state == "ready":
            try:
                _jax().devices()
            except BackendUnavailableError as error:
                return Status("unavailable", status.version, str(error))
            except Exception as error:
                return Status("unavailable", status.version, f"jax has no device: {error}")
        return status

    def devices(self) -> tuple[str, ...]:
        """List the devices of the default platform, then the CPU devices."""
        jax = _jax()
        return tuple(dict.fromkeys(_device_name(d) for d in (*jax.devices(), *jax.devices("cpu"))))

    def namespace(self) -> Any:
        """Return ``jax.numpy``, which is an array API namespace."""
        return _jax().numpy

    def owns(self, x: object) -> bool:
        """Recognise arrays and tracers."""
        return isinstance(x, _library().Array)

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Convert a JAX array, a contiguous NumPy array, or an array on a device of JAX."""
        jax = _jax()
        if isinstance(x, jax.Array):
            y = jax.numpy.array(x, copy=True) if copy else x
        elif isinstance(x, np.ndarray) and dtype_name(x.dtype) == "bfloat16":  # NumPy cannot export it by DLPack
            y = jax.numpy.asarray(x)
        else:
            y = jax.dlpack.from_dlpack(x, copy=copy)
        if not isinstance(x, jax.Array):
            y.block_until_ready()  # JAX copies asynchronously, and the source may change meanwhile
        if device is None or self.device_of(y) in (device, None):
            return y
        if copy is False:
            raise ValueError(f"an array on {self.device_of(y)} cannot reach {device} without a copy")
        return jax.device_put(y, self.native_device(device))

    def device_of(self, x: Array) -> str | None:
        """Return the device of an array; None for tracers and for arrays on several devices."""
        if isinstance(x, _library().core.Tracer):
            return None
        devices = x.devices()
        return _device_name(next(iter(devices))) if len(devices) == 1 else None

    def native_device(self, device: str | None) -> Any:
        """Return the JAX device of this name."""
        if device is None:
            return None
        jax = _jax()
        return next(d for d in (*jax.devices(), *jax.devices("cpu")) if _device_name(d) == device)

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """Return a read-only view of host memory, or a copy from another device."""
        return np.asarray(x)

    def shares(self, x: Array) -> bool:
        """Share arrays on any CPU device, and contiguous NumPy arrays."""
        return super().shares(x) if isinstance(x, np.ndarray) else self.state(x).readable

    def dtype(self, name: str) -> Any:
        """Return JAX's dtype; raise an error if 32-bit mode would replace it by a narrower one."""
        if name in WIDE and not _jax().config.jax_enable_x64:
            raise DTypeError(
                f"jax is in 32-bit mode and has no {name}; enable it with "
                'jax.config.update("jax_enable_x64", True), or JAX_ENABLE_X64=1 in the environment'
            )
        return np.dtype(super().dtype(name))

    def state(self, x: Array) -> ArrayState:
        """Declare tracers captive, and only concrete arrays on the CPU readable."""
        if isinstance(x, _library().core.Tracer):
            return TRACED
        device = self.device_of(x)
        return READY if device is not None and device.startswith("cpu") else ArrayState(readable=False)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Require that JAX can compute in this process."""
        _jax()
        return super().scope()

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile with ``jax.jit``."""
        return _jax().jit(function)  # type: ignore[no-any-return]  # JAX is Any to the type checker

    def register(self, kind: type) -> None:
        """Register the class as a pytree."""
        from ._prepared import register

        register(kind)

    def scan(self, body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, length: int) -> tuple[Any, Any]:
        """Loop with ``lax.scan``, so that neither the program nor its memory grows with the length."""
        jax = _jax()
        from ._placed import settled

        return jax.lax.scan(body, settled(body, carry), jax.numpy.arange(length))  # type: ignore[no-any-return]  # JAX is Any to the type checker

    def cond(self, predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """Branch with ``lax.cond`` where the predicate is traced."""
        if not isinstance(predicate, _jax().core.Tracer):
            return super().cond(predicate, if_true, if_false)
        from ._placed import branched

        return branched(predicate, if_true, if_false)

    def rounded(self, x: Array) -> Array:
        """Return ``x`` behind a selection, through which XLA contracts no product with a sum."""
        jnp = _jax().numpy
        return jnp.where(jnp.isnan(x), jnp.nan, x)

    def update_slice(self, x: Array, value: Array, start: Any, axis: int) -> Array:
        """Write with ``dynamic_update_slice``: ``start`` may be traced, and the memory of a donated ``x`` is reused."""
        jax = _jax()
        if getattr(start, "ndim", 0) == 1 and x.shape[0] > 1:
            each = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis % x.ndim - 1)
            return jax.vmap(each)(x, value, start)
        start = start[0] if getattr(start, "ndim", 0) == 1 else start
        if isinstance(start, jax.core.Tracer):
            from ._write import write

            return write(x, value, start, axis % x.ndim)
        return jax.lax.dynamic_update_slice_in_dim(x, value, start, axis)

    def index_add(self, x: Array, index: Array, value: Array) -> Array:
        """Use JAX's scatter-add."""
        return x.at[index].add(value)

    def follows(self, *arrays: Array | None) -> bool:
        """Return whether any of the arrays is traced."""
        tracer = _jax().core.Tracer
        return any(isinstance(x, tracer) for x in arrays)

    def differentiable(
        self, forward: Callable[..., tuple[Array, Any]], backward: Callable[[Array, Any], tuple[Any, ...]]
    ) -> Callable[..., Array]:
        """Define the gradients and tangents for JAX."""
        from ._differentiable import differentiable
        from ._placed import alike

        return lambda *arrays: differentiable(forward, backward)(*alike(*arrays))

    def notes(self, device: str | None = None) -> tuple[str, ...]:
        """Say which native kernels there are for arrays on the CPU."""
        from ._foreign import missing

        return (note("jax", missing),) if device is None or device.startswith("cpu") else ()

    def synchronize(self, *arrays: Array) -> None:
        """Wait for JAX's asynchronous dispatch."""
        _jax().block_until_ready(arrays)


def _device_name(device: Any) -> str:
    if device.platform == "cpu":
        return "cpu" if device.id == 0 else f"cpu:{device.id}"
    platform = "cuda" if device.platform == "gpu" else device.platform
    return f"{platform}:{device.id}"


backend = JaxBackend()
