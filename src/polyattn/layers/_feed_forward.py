"""The feed-forward layer of a transformer: up projection, activation or gated unit, down projection."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError
from ..functional import _geglu, _gelu, _linear, _relu, _silu, _swiglu
from ._initial import checked_sizes, generator
from ._layer import Layer, named
from ._projection import Projection

__all__ = ["FeedForward", "FeedForwardInputs"]


class Activation(NamedTuple):
    """The native functions of an activation and their static arguments; a gated activation takes two arrays."""

    operation: Any
    options: dict[str, Any]
    gated: bool = False


ACTIVATIONS = {
    "gelu": Activation(_gelu, {"approximate": "none"}),
    "gelu_tanh": Activation(_gelu, {"approximate": "tanh"}),
    "relu": Activation(_relu, {}),
    "silu": Activation(_silu, {}),
    "swiglu": Activation(_swiglu, {}, gated=True),
    "geglu": Activation(_geglu, {"approximate": "none"}, gated=True),
}


class FeedForwardInputs(NamedTuple):
    """The gradient of a :class:`FeedForward`'s input."""

    x: Array


class Saved(NamedTuple):
    """What the backward needs."""

    gate_proj: _linear.Saved | None
    up_proj: _linear.Saved
    activation: Any
    down_proj: _linear.Saved


class FeedForward(Layer):
    """Two projections with an activation between them, or three with a gated activation.

    Parameters
    ----------
    d_model, hidden : int
        Width of the input and of the result, and width between the projections.
    activation : {"gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"}
        The last two are gated: φ(x W_gate) ⊙ x W_up, so there is a third projection. gelu is the exact one,
        gelu_tanh its approximation by tanh, as in GPT-2.
    bias : bool
        Whether the projections have biases, initially zero.
    init : {"xavier_uniform", "normal"}
        Distribution of the weights: uniform within ±√(6/(in + out)), or normal with standard deviation 1/√in.
    seed : int
        The same seed gives the same parameters on every backend.
    dtype : str
    backend, device : str, optional
        Where the parameters are and the layer computes; the default is the selection in force, else NumPy.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError, UnknownBackendError, BackendUnavailableError

    Notes
    -----
    Parameters: ``up_proj.weight`` (d_model, hidden), ``down_proj.weight`` (hidden, d_model), for a gated
    activation ``gate_proj.weight`` (d_model, hidden) before them, and a ``.bias`` of each.
    Vaswani et al., "Attention is all you need" (2017); Shazeer, "GLU variants improve transformer" (2020).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> layer = pa.FeedForward(8, 32, activation="swiglu", bias=False, dtype="float64")
    >>> y, cache = layer.forward(np.ones((2, 5, 8)))
    >>> inputs, grads = layer.backward(np.ones_like(y), cache)
    >>> inputs.x.shape, list(grads)
    ((2, 5, 8), ['gate_proj.weight', 'up_proj.weight', 'down_proj.weight'])
    """

    def __init__(
        self, d_model: int, hidden: int, *, activation: str = "gelu", bias: bool = True,
        init: str = "xavier_uniform", seed: int = 0, dtype: str = "float32", backend: str | None = None,
        device: str | None = None,
    ) -> None:  # fmt: skip
        self.d_model, self.hidden = checked_sizes(d_model=d_model, hidden=hidden)
        if activation not in tuple(ACTIVATIONS):
            raise ArgumentError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation, self.bias = activation, bool(bias)
        shared: dict[str, Any] = {"dtype": dtype, "backend": backend, "device": device}
        projection: dict[str, Any] = {"bias": bias, "init": init, "seed": generator(seed), **shared}
        gated = ACTIVATIONS[activation].gated
        self.gate_proj = Projection(self.d_model, self.hidden, **projection) if gated else None
        self.up_proj = Projection(self.d_model, self.hidden, **projection)
        self.down_proj = Projection(self.hidden, self.d_model, **projection)
        super().__init__({}, **shared)

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        return {name: getattr(self, name) for name in ("d_model", "hidden", "activation", "bias")}

    def __call__(self, x: Array) -> Array:
        """Return the layer's result for x (…, d_model), without a cache."""
        return self._call(self._checked_input(x, self.d_model))

    def forward(self, x: Array) -> tuple[Array, Cache]:
        """Return ``(y, cache)``."""
        return self._call_with_cache(self._checked_input(x, self.d_model))

    def backward(self, dy: Array, cache: Cache, *, inputs: bool = True) -> tuple[FeedForwardInputs, dict[str, Array]]:
        """Return dx, and the gradients of the parameters by name, summed over every leading axis.

        With ``inputs=False``, for the first layer of a model, dx is None and not computed.
        """
        return self._call_backward(dy, cache, inputs=inputs)

    def native_forward(self, backend: Backend, x: Array) -> tuple[Array, Saved]:
        """Return φ(x W_up) W_down, or φ(x W_gate, x W_up) W_down for a gated φ, with the biases."""
        operation, options, _ = ACTIVATIONS[self.activation]
        gate_proj = None
        up, up_proj = self.up_proj.native_forward(backend, x)  # (…, hidden)
        if self.gate_proj is None:
            inner, activation = operation.forward(backend, up, **options)  # (…, hidden)
        else:
            gate, gate_proj = self.gate_proj.native_forward(backend, x)  # (…, hidden)
            inner, activation = operation.forward(backend, gate, up, **options)  # (…, hidden)
        y, down_proj = self.down_proj.native_forward(backend, inner)  # (…, d_model)
        return y, Saved(gate_proj, up_proj, activation, down_proj)

    def native_backward(
        self, backend: Backend, dy: Array, saved: Saved, *, inputs: bool = True
    ) -> tuple[FeedForwardInputs, dict[str, Array]]:
        """Compute the gradients in reverse order; without ``inputs`` that of x is None."""
        operation = ACTIVATIONS[self.activation].operation
        (dinner,), ddown_proj = self.down_proj.native_backward(backend, dy, saved.down_proj)
        *dgates, dup = operation.backward(backend, dinner, saved.activation)  # with a gate, its gradient comes first
        (dx,), dup_proj = self.up_proj.native_backward(backend, dup, saved.up_proj, inputs=inputs)
        if self.gate_proj is None or saved.gate_proj is None:
            return FeedForwardInputs(dx), named(up_proj=dup_proj, down_proj=ddown_proj)
        (dx_of_gate,), dgate_proj = self.gate_proj.native_backward(backend, dgates[0], saved.gate_proj, inputs=inputs)
        dx = dx + dx_of_gate if inputs else None
        return FeedForwardInputs(dx), named(gate_proj=dgate_proj, up_proj=dup_proj, down_proj=ddown_proj)
