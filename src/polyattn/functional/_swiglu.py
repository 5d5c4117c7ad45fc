"""SwiGLU, the linear unit gated by SiLU, and its backward."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ..kernels import cast, widen
from ._checks import expect_arrays, expect_one_dtype, expect_shape
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._silu import Activation, Silu, activation_forward

__all__ = ["SwigluGrads", "swiglu", "swiglu_backward", "swiglu_forward"]


class SwigluGrads(NamedTuple):
    """The gradients of :func:`swiglu`."""

    gate: Array
    up: Array


class Saved(NamedTuple):
    """What the backward needs."""

    gate: Array
    up: Array


def forward(backend: Backend, gate: Array, up: Array) -> tuple[Array, Saved]:
    """Return gate · σ(gate) · up."""
    y = backend.operation("swiglu", gate, up)
    return activation_forward(backend, Silu, gate, up) if y is None else y, Saved(gate, up)


def backward(backend: Backend, dy: Array, saved: Saved) -> SwigluGrads:
    """Return dy · up · (σ(gate) + gate · σ′(gate)), and dy · gate · σ(gate)."""
    grads = backend.operation("swiglu_backward", dy, *saved)
    return SwigluGrads(*(gated_backward(backend, Silu, dy, *saved) if grads is None else grads))


def gated_backward(
    backend: Backend, activation: type[Activation], dy: Array, gate: Array, up: Array
) -> tuple[Array, Array]:
    """Return the gradients of gate and up."""
    xp = backend.namespace()

    def formula(dy: Array, gate: Array, up: Array) -> tuple[Array, Array]:
        dy_, up_, f = widen(xp, dy), widen(xp, up), activation(xp, widen(xp, gate))
        # y = f(gate) · up
        dup = dy_ * f.factor() * f.decay
        product, slope = dy_ * up_, f.slope()
        dgate, readable = product * f.decay * slope * f.decay, backend.state(gate).readable
        if not readable or not bool(xp.isfinite(xp.sum(dgate))):
            apart = (dy_ * f.root * f.root) * slope * (up_ * f.root * f.root)
            # A trace stays linear in dy, since JAX transposes backwards.
            dgate = xp.where(xp.isfinite(product), dgate, apart) if readable else apart
        return cast(xp, dgate, gate.dtype), cast(xp, dup, up.dtype)

    dgate, dup = backend.by_rows(formula, dy, gate, up, axes=0)
    return dgate, dup


OPERATION = Operation("swiglu", forward, backward)


def swiglu(gate: Array, up: Array) -> Array:
    r"""Return silu(gate) · up, element by element: :math:`y = g \, \sigma(g) \, u`.

    Gate and up projection are two arrays. If one projection computes both, split its
    result: which half is the gate depends on the model.

    Parameters
    ----------
    gate, up : array
        Floating, of one shape and dtype; float16 and bfloat16 are computed in float32.

    Raises
    ------
    ShapeError, DTypeError
        If the shapes or the dtypes differ (nothing is broadcast), or are not floating.

    Notes
    -----
    Shazeer, "GLU variants improve transformer" (2020).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.swiglu(np.array([-1.0, 0.0, 1.0]), np.array([2.0, 2.0, 2.0])).round(6)
    array([-0.537883,  0.      ,  1.462117])
    """
    return run(OPERATION, checked_pair(gate, up))


def swiglu_forward(gate: Array, up: Array) -> tuple[Array, Cache]:
    """Return ``(swiglu(gate, up), cache)``."""
    return run_with_cache(OPERATION, checked_pair(gate, up))


def swiglu_backward(dy: Array, cache: Cache) -> SwigluGrads:
    """Return dy · up · silu′(gate) for the gate, and dy · silu(gate) for up."""
    return run_backward(OPERATION, dy, cache, SwigluGrads)


def checked_pair(gate: Array, up: Array) -> dict[str, Array]:
    """Check the arrays of a gated unit, and return them by name."""
    expect_arrays(gate=gate, up=up)
    expect_one_dtype(gate=gate, up=up)
    expect_shape("up", up, tuple(gate.shape))
    return {"gate": gate, "up": up}
