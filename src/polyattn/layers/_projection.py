"""The projection layer: y = x W + b."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Backend, Cache
from ..functional import _linear
from ._initial import checked_sizes, generator, initial_weight
from ._layer import Layer

__all__ = ["Projection", "ProjectionInputs"]


class ProjectionInputs(NamedTuple):
    """The gradient of a :class:`Projection`'s input."""

    x: Array


class Projection(Layer):
    """An affine map of the last axis, y = x W + b.

    Parameters
    ----------
    in_features, out_features : int
        ``weight`` is (in_features, out_features).
    bias : bool
        Whether there is a ``bias`` (out_features,), initially zero.
    init : {"xavier_uniform", "normal"}
        Distribution of the weight: uniform within ±√(6/(in + out)), or normal with standard deviation 1/√in.
    seed : int
        The same seed gives the same weight on every backend.
    dtype : str
    backend, device : str, optional
        Where the parameters are and the layer computes; the default is the selection in force, else NumPy.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError, UnknownBackendError, BackendUnavailableError

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> layer = pa.Projection(4, 2, dtype="float64")
    >>> y, cache = layer.forward(np.ones((3, 4)))
    >>> inputs, grads = layer.backward(np.ones_like(y), cache)
    >>> inputs.x.shape, grads["weight"].shape, grads["bias"]
    ((3, 4), (4, 2), array([3., 3.]))
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, init: str = "xavier_uniform", seed: int = 0,
        dtype: str = "float32", backend: str | None = None, device: str | None = None,
    ) -> None:  # fmt: skip
        self.in_features, self.out_features = checked_sizes(in_features=in_features, out_features=out_features)
        self.bias = bool(bias)
        parameters = {"weight": initial_weight(generator(seed), init, self.in_features, self.out_features)}
        if bias:
            parameters["bias"] = np.zeros(self.out_features)
        super().__init__(parameters, dtype, backend, device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        return {"in_features": self.in_features, "out_features": self.out_features, "bias": self.bias}

    def __call__(self, x: Array) -> Array:
        """Return x W + b for x (…, in_features), without a cache."""
        return self._call(self._checked_input(x, self.in_features))

    def forward(self, x: Array) -> tuple[Array, Cache]:
        """Return ``(x W + b, cache)``."""
        return self._call_with_cache(self._checked_input(x, self.in_features))

    def backward(self, dy: Array, cache: Cache, *, inputs: bool = True) -> tuple[ProjectionInputs, dict[str, Array]]:
        """Return dx = dy Wᵀ, and {weight: xᵀ dy, bias: Σ dy} summed over every leading axis.

        With ``inputs=False``, for the first layer of a model, dx is None and not computed.
        """
        return self._call_backward(dy, cache, inputs=inputs)

    def native_forward(self, backend: Backend, x: Array) -> tuple[Array, _linear.Saved]:
        """Return x W + b."""
        return _linear.forward(backend, x, self._parameters["weight"], self._parameters.get("bias"))

    def native_backward(
        self, backend: Backend, dy: Array, saved: _linear.Saved, *, inputs: bool = True
    ) -> tuple[ProjectionInputs, dict[str, Array]]:
        """Return the gradients of the input and the parameters; without ``inputs`` that of x is None."""
        dx, dweight, dbias = _linear.backward(backend, dy, saved, inputs=inputs)
        return ProjectionInputs(dx), {"weight": dweight} if dbias is None else {"weight": dweight, "bias": dbias}
