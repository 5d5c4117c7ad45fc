"""The layer-norm layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Backend, Cache
from ..functional import _layer_norm
from ..functional._norms import checked_eps
from ..kernels._static import concrete
from ._initial import checked_sizes
from ._layer import Layer

__all__ = ["LayerNorm", "LayerNormInputs"]


class LayerNormInputs(NamedTuple):
    """The gradient of a :class:`LayerNorm`'s input."""

    x: Array


class LayerNorm(Layer):
    """Layer normalisation of the last axis, with gain and shift: :func:`polyattn.functional.layer_norm`.

    Parameters
    ----------
    features : int
        Length of the last axis. ``weight`` (features,) is initially one.
    eps : float
        Added to the variance, inside the root.
    bias : bool
        Whether there is a shift ``bias`` (features,), initially zero.
    dtype : str
    backend, device : str, optional
        Where the parameters are and the layer computes; the default is the selection in force, else NumPy.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError, UnknownBackendError, BackendUnavailableError

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.LayerNorm(2, eps=0.0, dtype="float64")(np.array([[1.0, 3.0]]))
    array([[-1.,  1.]])
    """

    def __init__(
        self, features: int, *, eps: float = 1e-5, bias: bool = True, dtype: str = "float32",
        backend: str | None = None, device: str | None = None,
    ) -> None:  # fmt: skip
        (self.features,) = checked_sizes(features=features)
        self.eps, self.bias = checked_eps(eps), bool(bias)
        parameters = {"weight": np.ones(self.features)}
        if bias:
            parameters["bias"] = np.zeros(self.features)
        super().__init__(parameters, dtype, backend, device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        return {"features": self.features, "eps": self.eps, "bias": self.bias}

    def __call__(self, x: Array) -> Array:
        """Return x (…, features) normalised, without a cache."""
        return self._call(self._checked_input(x, self.features))

    def forward(self, x: Array) -> tuple[Array, Cache]:
        """Return ``(y, cache)``."""
        return self._call_with_cache(self._checked_input(x, self.features))

    def backward(self, dy: Array, cache: Cache) -> tuple[LayerNormInputs, dict[str, Array]]:
        """Return dx, and {weight, bias} summed over every leading axis."""
        return self._call_backward(dy, cache)

    def native_forward(self, backend: Backend, x: Array) -> tuple[Array, _layer_norm.Saved]:
        """Return x normalised."""
        return _layer_norm.forward(
            backend, x, self._parameters["weight"], self._parameters.get("bias"), eps=concrete(self.eps)
        )

    def native_backward(
        self, backend: Backend, dy: Array, saved: _layer_norm.Saved
    ) -> tuple[LayerNormInputs, dict[str, Array]]:
        """Return the gradients of the input and the parameters."""
        dx, dweight, dbias = _layer_norm.backward(backend, dy, saved)
        return LayerNormInputs(dx), {"weight": dweight} if dbias is None else {"weight": dweight, "bias": dbias}
