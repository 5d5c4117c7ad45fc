"""The feed-forward layer of a transformer: up, through an activation or a gate, and down again."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError
from ..functional import _geglu, _gelu, _linear, _relu, _silu, _swiglu
from ..functional._operation import Operation
from ._initial import checked_sizes, generator, initial_weight
from ._layer import Layer

__all__ = ["FeedForward", "FeedForwardInputs"]

# Each activation's forward and backward, and what else they take; then those of two arrays, the gate and the rest.
PLAIN: dict[str, Any] = {
    "gelu": (_gelu, {"approximate": "none"}), "gelu_tanh": (_gelu, {"approximate": "tanh"}), "relu": (_relu, {}),
    "silu": (_silu, {}),
}  # fmt: skip
GATED: dict[str, Any] = {"swiglu": (_swiglu, {}), "geglu": (_geglu, {"approximate": "none"})}
ACTIVATIONS = PLAIN | GATED
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class FeedForwardInputs(NamedTuple):
    """The gradient of a :class:`FeedForward`'s input."""

    x: Array


def forward(backend: Backend, x: Array, *parameters: Array | None, activation: str) -> tuple[Array, tuple[Any, ...]]:
    """Return φ(x W_up) W_down, or φ(x W_gate, x W_up) W_down for a gated φ, with the biases."""
    gate_w, up_w, down_w, gate_b, up_b, down_b = parameters
    operation, options = ACTIVATIONS[activation]
    up, _ = _linear.forward(backend, x, up_w, up_b)  # (…, hidden)
    halves = (up,) if gate_w is None else (_linear.forward(backend, x, gate_w, gate_b)[0], up)
    inner, inner_saved = operation.forward(backend, *halves, **options)  # (…, hidden)
    y, _ = _linear.forward(backend, inner, down_w, down_b)  # (…, d_model)
    return y, (x, inner, *parameters, *inner_saved)


def backward(
    backend: Backend, dy: Array, saved: tuple[Any, ...], *, activation: str, inputs: bool = True
) -> tuple[Any, ...]:
    """Reverse each line; the gradient of x, then the parameters'."""
    x, inner, gate_w, up_w, down_w, gate_b, up_b, down_b, *inner_saved = saved
    operation, options = ACTIVATIONS[activation]
    # y = inner W_down + b_down
    dinner, ddown_w, ddown_b = _linear.backward(backend, dy, (inner, down_w, down_b))
    # inner = φ(gate, up)
    *dgates, dup = operation.backward(backend, dinner, tuple(inner_saved), **options)
    # up = x W_up + b_up, gate = x W_gate + b_gate
    dx, dup_w, dup_b = _linear.backward(backend, dup, (x, up_w, up_b), inputs=inputs)
    dgate_w = dgate_b = None
    for dgate in dgates:
        dx_of_gate, dgate_w, dgate_b = _linear.backward(backend, dgate, (x, gate_w, gate_b), inputs=inputs)
        dx = dx + dx_of_gate if inputs else None
    return dx, dgate_w, dup_w, ddown_w, dgate_b, dup_b, ddown_b


class FeedForward(Layer):
    """Two projections around an activation, or three around a gate.

    Parameters
    ----------
    d_model, hidden : int
        Length of the last axis, and of what is between the projections.
    activation : {"gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"}
        The last two are gated: φ(x W_gate) ⊙ x W_up, so there is a third projection. gelu is the exact one,
        gelu_tanh its approximation by tanh, as in GPT-2.
    bias : bool
        Whether the projections have biases; they start at zero.
    init : {"xavier_uniform", "normal"}
        Distribution of the weights: uniform within ±√(6/(in + out)), or normal with deviation 1/√in.
    seed : int
        The same seed gives the same parameters on every backend.
    dtype : str
    backend, device : str, optional
        Where the parameters live and the layer computes.

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

    _operation = Operation("FeedForward", forward, backward)
    _slots = (*(f"{name}.weight" for name in PROJECTIONS), *(f"{name}.bias" for name in PROJECTIONS))

    def __init__(
        self, d_model: int, hidden: int, *, activation: str = "gelu", bias: bool = True,
        init: str = "xavier_uniform", seed: int = 0, dtype: str = "float32", backend: str | None = None,
        device: str | None = None,
    ) -> None:  # fmt: skip
        self.d_model, self.hidden = checked_sizes(d_model=d_model, hidden=hidden)
        if activation not in tuple(ACTIVATIONS):
            raise ArgumentError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation, self.bias = activation, bool(bias)
        super().__init__(self._initial(init, seed), dtype, backend, device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that make a layer of the same architecture."""
        return {name: getattr(self, name) for name in ("d_model", "hidden", "activation", "bias")}

    def __call__(self, x: Array) -> Array:
        """Return the layer's result for x (…, d_model), and keep nothing."""
        return self._call(self._of_width(x, self.d_model), {"activation": self.activation})

    def forward(self, x: Array) -> tuple[Array, Cache]:
        """Return ``(y, cache)``."""
        return self._record(self._of_width(x, self.d_model), {"activation": self.activation})

    def backward(self, dy: Array, cache: Cache, *, inputs: bool = True) -> tuple[FeedForwardInputs, dict[str, Array]]:
        """Return dx, and the gradients of the parameters by name, summed over every leading axis.

        ``inputs=False``, for the first layer of a model, leaves out dx: it is None.
        """
        dinputs, grads = self._pull(dy, cache, ("x",), inputs=inputs)
        return FeedForwardInputs(*dinputs), {name: grads[name] for name in self._parameters}

    def _initial(self, init: str, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        rng, parameters = generator(seed), {}
        for name in PROJECTIONS[self.activation not in GATED :]:
            sizes = (self.hidden, self.d_model) if name == "down_proj" else (self.d_model, self.hidden)
            parameters[f"{name}.weight"] = initial_weight(rng, init, *sizes)
            if self.bias:
                parameters[f"{name}.bias"] = np.zeros(sizes[1])
        return parameters
