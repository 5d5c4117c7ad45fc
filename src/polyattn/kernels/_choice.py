"""Which kernel computes a problem: the first of the backend's that supports it, else the generic one."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import KernelUnsupportedError
from ._plain import PlainKernel
from ._problem import Kernel, Problem
from ._tiled import TiledKernel

GENERIC: Kernel = TiledKernel()
PLAIN: Kernel = PlainKernel()


def candidates(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Return a backend's kernels, the generic one, and the plain one, which runs only where it is asked for."""
    return (*kernels, GENERIC, PLAIN)


def named(kernels: Sequence[Kernel], name: str) -> Kernel:
    """Return the kernel of that name.

    Raises
    ------
    KernelUnsupportedError
        If the backend has none of that name; the message lists those there are.
    """
    for kernel in candidates(kernels):
        if kernel.name == name:
            return kernel
    there = ", ".join(repr(kernel.name) for kernel in candidates(kernels))
    raise KernelUnsupportedError(f"kernel: this backend has no kernel {name!r}; it has {there}")


def choose(kernels: Sequence[Kernel], problem: Problem, name: str | None = None) -> Kernel:
    """Return the kernel that computes the problem; ``name`` forces one.

    Raises
    ------
    KernelUnsupportedError
        If the forced kernel does not exist or does not compute this problem, with its reason.
    """
    if name is not None:
        kernel = named(kernels, name)
        reason = kernel.supports(problem)
        if reason is not None:
            raise KernelUnsupportedError(f"kernel: {name!r} does not compute this problem: {reason}")
        return kernel
    for kernel in kernels:
        if kernel.supports(problem) is None:
            return kernel
    return GENERIC
