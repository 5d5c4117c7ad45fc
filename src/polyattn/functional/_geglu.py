"""GEGLU, the linear unit gated by GELU, and its backward."""

from __future__ import annotations

from typing import NamedTuple

from ..backend import Array, Backend, Cache
from ._dispatch import Operation, run, run_backward, run_with_cache
from ._gelu import GELU, checked_approximate
from ._silu import activation_forward
from ._swiglu import checked_pair, gated_backward

__all__ = ["GegluGrads", "geglu", "geglu_backward", "geglu_forward"]


class GegluGrads(NamedTuple):
    """The gradients of :func:`geglu`."""

    gate: Array
    up: Array


class Saved(NamedTuple):
    """What the backward needs."""

    gate: Array
    up: Array
    approximate: str


def forward(backend: Backend, gate: Array, up: Array, *, approximate: str) -> tuple[Array, Saved]:
    """Return gate · Φ(gate) · up."""
    y = backend.operation("geglu", gate, up, approximate=approximate)
    y = activation_forward(backend, GELU[approximate], gate, up) if y is None else y
    return y, Saved(gate, up, approximate)


def backward(backend: Backend, dy: Array, saved: Saved) -> GegluGrads:
    """Return dy · up · (Φ(gate) + gate · Φ′(gate)), and dy · gate · Φ(gate)."""
    gate, up, approximate = saved
    grads = backend.operation("geglu_backward", dy, gate, up, approximate=approximate)
    return GegluGrads(*(gated_backward(backend, GELU[approximate], dy, gate, up) if grads is None else grads))


OPERATION = Operation("geglu", forward, backward)


def geglu(gate: Array, up: Array, *, approximate: str = "none") -> Array:
    r"""Return gelu(gate) · up, element by element: :math:`y = g \, \Phi(g) \, u`.

    Gate and up projection are two arrays. If one projection computes both, split its
    result: which half is the gate depends on the model.

    Parameters
    ----------
    gate, up : array
        Floating, of one shape and dtype; float16 and bfloat16 are computed in float32.
    approximate : {"none", "tanh"}
        As in :func:`gelu`.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError
        If the shapes or the dtypes differ (nothing is broadcast), or are not floating, or
        ``approximate`` is neither of the two.

    Notes
    -----
    Shazeer, "GLU variants improve transformer" (2020).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.functional.geglu(np.array([-1.0, 0.0, 1.0]), np.array([2.0, 2.0, 2.0])).round(6)
    array([-0.317311,  0.      ,  1.682689])
    """
    return run(OPERATION, checked_pair(gate, up), checked_approximate(approximate))


def geglu_forward(gate: Array, up: Array, *, approximate: str = "none") -> tuple[Array, Cache]:
    """Return ``(geglu(gate, up), cache)``."""
    return run_with_cache(OPERATION, checked_pair(gate, up), checked_approximate(approximate))


def geglu_backward(dy: Array, cache: Cache) -> GegluGrads:
    """Return dy · up · gelu′(gate) for the gate, and dy · gelu(gate) for up."""
    return run_backward(OPERATION, dy, cache, GegluGrads)
