"""The choice of a kernel: the first kernel of the backend that supports the problem, else the generic one."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import KernelUnsupportedError
from ._plain import PlainKernel
from ._problem import Kernel, Problem
from ._tiled import TiledKernel

GENERIC: Kernel = TiledKernel()
PLAIN: Kernel = PlainKernel()


def candidates(kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Return the backend's kernels, the generic kernel, and the plain kernel, which runs only when forced by name."""
    return (*kernels, GENERIC, PLAIN)


def named(kernels: Sequence[Kernel], name: str) -> Kernel:
    """Return the kernel of that name.

    Raises
    ------
    KernelUnsupportedError
        If the backend has no kernel of that name; the message lists its kernels.
    """
    for kernel in candidates(kernels):
        if kernel.name == name:
            return kernel
    there = ", ".join(repr(kernel.name) for kernel in candidates(kernels))
    raise KernelUnsupportedError(f"kernel: this backend has no kernel {name!r}; it has {there}")


def refusal(kernel: Kernel, problem: Problem) -> str | None:
    """Return why a kernel does not compute a problem, or None if it does.

    Features of length 0 are valid, but only the generic and the plain kernel have to support them.
    """
    if 0 in (problem.sizes.d_k, problem.sizes.d_v) and not isinstance(kernel, TiledKernel | PlainKernel):
        return "there are features of length 0"
    return kernel.supports(problem)


def choose(kernels: Sequence[Kernel], problem: Problem, name: str | None = None) -> Kernel:
    """Return the kernel that computes the problem; ``name`` forces one.

    Raises
    ------
    KernelUnsupportedError
        If the forced kernel does not exist or does not support this problem; the message gives the reason.
    """
    if name is not None:
        kernel = named(kernels, name)
        reason = refusal(kernel, problem)
        if reason is not None:
            raise KernelUnsupportedError(f"kernel: {name!r} does not compute this problem: {reason}")
        return kernel
    for kernel in kernels:
        if refusal(kernel, problem) is None:
            return kernel
    return GENERIC
