"""The root-mean-square norm layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Backend, Cache
from ..functional import _rms_norm
from ..functional._norms import checked_eps
from ..kernels._static import concrete
from ._initial import checked_sizes
from ._layer import Layer

__all__ = ["RMSNorm", "RMSNormInputs"]


class RMSNormInputs(NamedTuple):
    """The gradient of a :class:`RMSNorm`'s input."""

    x: Array


class RMSNorm(Layer):
    """Division of the last axis by its root mean square, with a gain: :func:`polyattn.functional.rms_norm`.

    Parameters
    ----------
    features : int
        Length of the last axis. ``weight`` (features,) is initially one.
    eps : float
        Added to the mean square, inside the root.
    dtype : str
    backend, device : str, optional
        Where the parameters are and the layer computes; the default is the selection in force, else NumPy.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError, UnknownBackendError, BackendUnavailableError

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> pa.RMSNorm(2, eps=0.0, dtype="float64")(np.array([[1.0, 7.0]]))
    array([[0.2, 1.4]])
    """

    def __init__(
        self, features: int, *, eps: float = 1e-5, dtype: str = "float32", backend: str | None = None,
        device: str | None = None,
    ) -> None:  # fmt: skip
        (self.features,) = checked_sizes(features=features)
        self.eps = checked_eps(eps)
        super().__init__({"weight": np.ones(self.features)}, dtype, backend, device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        return {"features": self.features, "eps": self.eps}

    def __call__(self, x: Array) -> Array:
        """Return x (…, features) normalised, without a cache."""
        return self._call(self._checked_input(x, self.features))

    def forward(self, x: Array) -> tuple[Array, Cache]:
        """Return ``(y, cache)``."""
        return self._call_with_cache(self._checked_input(x, self.features))

    def backward(self, dy: Array, cache: Cache) -> tuple[RMSNormInputs, dict[str, Array]]:
        """Return dx, and {weight} summed over every leading axis."""
        return self._call_backward(dy, cache)

    def native_forward(self, backend: Backend, x: Array) -> tuple[Array, _rms_norm.Saved]:
        """Return x normalised."""
        return _rms_norm.forward(backend, x, self._parameters["weight"], eps=concrete(self.eps))

    def native_backward(
        self, backend: Backend, dy: Array, saved: _rms_norm.Saved
    ) -> tuple[RMSNormInputs, dict[str, Array]]:
        """Return the gradients of the input and the parameters."""
        dx, dweight = _rms_norm.backward(backend, dy, saved)
        return RMSNormInputs(dx), {"weight": dweight}
