"""PyTorch as a polyattn backend: CPU, CUDA and Apple's MPS devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from polyattn.backend import (
    READY,
    Array,
    ArrayState,
    Backend,
    BackendMismatchError,
    DTypeError,
    Kernel,
    Scope,
    dtype_name,
)
from polyattn_native import note

from ._modes import COMPILED, PLAIN, RECORDED, ignore_our_log
from ._tracing import requires_grad, transformed

__all__ = ["backend"]

NO_VALUES = "a tensor on torch's meta device has no values to move"


TRACED = ArrayState(captive="is being traced by torch", readable=False)


class TorchBackend(Backend):
    """Torch tensors, including subclasses and the wrapped tensors of torch.func."""

    name = "torch"
    array_modules = ("torch",)
    install = 'pip install "polyattn[torch]"'

    lacks: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("jit", "scan"), "torch.compile does that from outside, and takes attention as one operator"),
    }

    @property
    def kernels(self) -> Sequence[Kernel]:  # type: ignore[override]  # it depends on torch's mode
        """Return the kernels for the current mode: plain, as autograd nodes, or as operators for torch.compile."""
        import torch

        if torch.compiler.is_compiling():
            ignore_our_log()
            return PLAIN if transformed() else COMPILED
        twice = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1  # a backward with create_graph
        return RECORDED if twice or torch.autograd.forward_ad._current_level >= 0 else PLAIN

    def devices(self) -> tuple[str, ...]:
        """List the CPU, the CUDA devices and MPS, with torch's default device first."""
        import torch

        found = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        if torch.backends.mps.is_available():
            found.append("mps:0")
        default = str(torch.get_default_device())
        return tuple(sorted(found, key=lambda name: name not in (default, f"{default}:0")))

    def namespace(self) -> Any:
        """Return array-api-compat's torch."""
        import array_api_compat.torch as xp

        return xp

    def owns(self, x: object) -> bool:
        """Recognise tensors."""
        import torch

        return isinstance(x, torch.Tensor)

    def asarray(self, x: object, device: str | None = None, copy: bool | None = None) -> Array:
        """Convert a tensor, a NumPy array with a layout that torch supports, or an array on a CUDA device."""
        import torch

        if isinstance(x, torch.Tensor):
            tensor = x
        elif isinstance(x, np.ndarray):
            # torch does not know NumPy's bfloat16, a dtype of ml_dtypes. While torch compiles, x.dtype is unavailable.
            bits = not torch.compiler.is_compiling() and dtype_name(x.dtype) == "bfloat16"
            tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if bits else torch.from_numpy(x)
        else:
            if any(step < 0 for step in getattr(x, "strides", None) or ()):  # torch aborts the process on these
                x = x.copy()  # type: ignore[attr-defined]  # CuPy's
            tensor = torch.from_dlpack(x)
        target = tensor.device if device is None else torch.device(device)
        if tensor.is_meta and target != tensor.device:
            raise BackendMismatchError(NO_VALUES)
        if copy is False and target != tensor.device:
            raise ValueError(f"a tensor on {tensor.device} cannot reach {target} without a copy")
        return tensor.to(target, copy=bool(copy))

    def device_of(self, x: Array) -> str:
        """Return torch's name of the device, with ``cpu`` in place of ``cpu:0``."""
        return "cpu" if x.is_cpu else str(x.device)

    def native_device(self, device: str | None) -> Any:
        """Return a ``torch.device``."""
        import torch

        return None if device is None else torch.device(device)

    def to_numpy(self, x: Array) -> np.ndarray[Any, Any]:
        """View the memory of a CPU tensor; copy from other devices, or if negation or conjugation is lazy."""
        import torch

        if x.is_meta:
            raise BackendMismatchError(NO_VALUES)
        x = x.detach().resolve_conj().resolve_neg().cpu()
        try:
            if x.dtype != torch.bfloat16:
                return np.asarray(x.numpy())
            import ml_dtypes

            return np.asarray(x.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        except ImportError as error:
            raise DTypeError("bfloat16 can leave torch only with ml_dtypes: pip install ml_dtypes") from error
        except (RuntimeError, TypeError) as error:  # a subclass without memory of its own, or memory of another kind
            raise BackendMismatchError(f"this {type(x).__name__} cannot leave torch: {error}") from error

    def shares(self, x: Array) -> bool:
        """Share CPU tensors without lazy negation or conjugation, and writable NumPy arrays that torch supports.

        Torch aborts the process on negative strides.
        """
        if not isinstance(x, np.ndarray):
            return bool(x.is_cpu and not x.is_neg() and not x.is_conj())
        axes = zip(x.shape, x.strides, strict=True)
        whole = all(s % x.itemsize == 0 and (s > 0 or (s == 0 and n <= 1)) for n, s in axes)
        return whole and x.flags.writeable and x.flags.aligned and x.dtype.isnative

    def state(self, x: Array) -> ArrayState:
        """Declare tensors of autograd, torch.func and torch.compile captive, and nested and sparse ones unusable."""
        import torch

        if torch.compiler.is_compiling():  # compiled backward graphs may read neither layout nor requires_grad
            return TRACED
        unusable = captive = None
        functorch = torch._C._functorch
        if x.is_nested:
            unusable = "is nested (pad it, and give the lengths)"
        elif x.layout is not torch.strided:
            unusable = "is sparse (to_dense() makes an array of it)"
        traced = functorch.is_functorch_wrapped_tensor(x) or hasattr(x, "fake_mode")
        if x.requires_grad:
            captive = "requires gradients (detach() it if they are not wanted)"
        elif traced:
            captive = TRACED.captive
        # Inside a transform the memory of a plain tensor is not readable either.
        readable = x.is_cpu and not traced and functorch.maybe_current_level() is None
        return ArrayState(unusable, captive, readable) if unusable or captive or not readable else READY

    def notes(self, device: str | None = None) -> tuple[str, ...]:
        """Say which native kernels there are for tensors on the CPU."""
        return (note("torch"),) if device in (None, "cpu") else ()

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Record no autograd graph, and disable autocast, which would lower the precision."""
        import torch

        if torch._C._is_any_autocast_enabled():
            lowered = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]
            return _as_written(lowered)
        if torch.compiler.is_compiling():
            recording: contextlib.AbstractContextManager[Any] = torch.set_grad_enabled(False)
            return recording
        return Scope(_unrecorded(torch._C._set_grad_enabled, torch.is_grad_enabled()))

    def operation(self, name: str, *arrays: Array | None, **options: Any) -> Any:
        """Compute it by the native library, if it has a kernel for these tensors, and torch does not trace."""
        import torch

        if torch.compiler.is_compiling():
            return None
        import polyattn_torch._pointwise as pointwise  # not ``from``, as above

        return pointwise.operation(name, *arrays, **options)

    def cond(self, predicate: Array, if_true: Callable[[], Any], if_false: Callable[[], Any]) -> Any:
        """Run the branch that the predicate selects; for a traced predicate both, for a meta tensor ``if_true``."""
        import torch
        from torch._C import _functorch
        from torch.utils import _pytree

        if predicate.is_meta:
            return if_true()
        traced = torch.compiler.is_compiling() or _functorch.is_functorch_wrapped_tensor(predicate)
        traced = traced or torch._C._len_torch_dispatch_stack() > 0  # for instance make_fx
        if not traced:
            return super().cond(predicate, if_true, if_false)

        def chosen(a: Any, b: Any) -> Any:
            return None if a is None else torch.where(predicate, a, b)

        return _pytree.tree_map(chosen, if_true(), if_false())

    def update_slice(self, x: Array, value: Array, start: int | Array, axis: int) -> Array:
        """Write into ``x`` itself, unless autograd records or a transform is active."""
        import torch

        followed = torch.is_grad_enabled() and (x.requires_grad or value.requires_grad)
        if followed or transformed():  # under vmap, x may lack the mapped axis of value
            return super().update_slice(x, value, start, axis)
        if getattr(start, "ndim", 0) == 1:
            return super().update_slice(x, value, start, axis)
        x.narrow(axis, start, value.shape[axis]).copy_(value)
        return x

    def index_add(self, x: Array, index: Array, value: Array) -> Array:
        """Use ``torch.Tensor.index_add``."""
        return x.index_add(0, index, value)

    def follows(self, *arrays: Array | None) -> bool:
        """Return whether any of the tensors requires gradients, or torch.compile traces a transform of torch.func."""
        import torch

        if torch.compiler.is_compiling() and transformed():
            return True
        return torch.is_grad_enabled() and requires_grad(arrays)

    def differentiable(
        self, forward: Callable[..., tuple[Array, Any]], backward: Callable[[Array, Any], tuple[Any, ...]]
    ) -> Callable[..., Array]:
        """Record the pair as one autograd node."""
        import polyattn_torch._autograd as nodes  # ``from`` would take longer than a small forward's checks

        return lambda *arrays: nodes.apply(self.scope, forward, backward, arrays)

    def synchronize(self, *arrays: Array) -> None:
        """Wait for the devices of the arrays."""
        import torch

        for device in {x.device for x in arrays}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type == "mps":
                torch.mps.synchronize()


def _unrecorded(set_recording: Callable[[bool], None], recording: bool) -> Generator[None]:
    """Record no autograd graph, as ``torch.no_grad``, which an interrupt at its beginning or end leaves in force."""
    try:
        set_recording(False)
        yield
    finally:
        set_recording(recording)


@contextlib.contextmanager
def _as_written(lowered: list[str]) -> Iterator[None]:
    """Record no autograd graph, and disable autocast for these device types."""
    import torch

    if not lowered:
        with torch.no_grad():
            yield
    else:
        with torch.autocast(lowered[0], enabled=False), _as_written(lowered[1:]):
            yield


backend = TorchBackend()
