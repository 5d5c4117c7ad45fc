"""Arrays and gradients of the libraries whose attention is checked."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from numpy.typing import NDArray

from ..target import open_backend

__all__ = ["Library", "library_named"]

Make = Callable[[NDArray[Any], str], Any]
Differentiate = Callable[[Callable[..., Any], Sequence[Any], Any], Sequence[Any]]


@dataclass(frozen=True)
class Library:
    """How to make arrays of a library, to read them, and to differentiate a function of them.

    ``make(x, dtype)`` returns an array of the library, and ``to_numpy(x)`` one of NumPy, with float32 for 16 bits.
    ``vjp(function, arrays, dout)`` returns the gradients of the arrays, or is None. ``strided`` says whether views with
    other strides exist, and ``negative`` whether strides can be negative.
    """

    name: str
    version: str
    make: Make
    to_numpy: Callable[[Any], NDArray[Any]]
    vjp: Differentiate | None
    dtypes: tuple[str, ...]
    strided: bool = False
    negative: bool = False


def library_named(name: str, module: ModuleType) -> Library:
    """Return a backend's library by name; or the one that an adapter defines by ``make``, ``to_numpy`` and ``vjp``."""
    if hasattr(module, "make") and hasattr(module, "to_numpy"):
        version, dtypes = getattr(module, "VERSION", ""), getattr(module, "DTYPES", ("float32",))
        return Library(name, version, module.make, module.to_numpy, getattr(module, "vjp", None), dtypes)
    target = open_backend(name)
    return Library(
        name, target.version, target.make, target.to_np, {"torch": _torch_vjp, "jax": _jax_vjp}.get(name),
        target.dtypes, strided=name in ("numpy", "torch", "cupy"), negative=name in ("numpy", "cupy"),
    )  # fmt: skip


def _torch_vjp(function: Callable[..., Any], arrays: Sequence[Any], dout: Any) -> Sequence[Any]:
    torch = importlib.import_module("torch")
    inputs = [x.detach().requires_grad_() for x in arrays]
    grads = torch.autograd.grad(function(*inputs), inputs, dout, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)]


def _jax_vjp(function: Callable[..., Any], arrays: Sequence[Any], dout: Any) -> Sequence[Any]:
    _, pull = importlib.import_module("jax").vjp(function, *arrays)
    return list(pull(dout))
