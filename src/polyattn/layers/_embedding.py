"""The embedding layer: a table whose rows are looked up by index."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..functional import _embedding
from ..functional._embedding import checked_indices
from ._initial import checked_sizes, generator
from ._layer import Layer

__all__ = ["Embedding", "EmbeddingInputs"]


class EmbeddingInputs(NamedTuple):
    """The gradient of an :class:`Embedding`'s input: none, for integers."""

    indices: None


class Embedding(Layer):
    """A table whose rows are looked up by index: :func:`polyattn.functional.embedding`.

    Parameters
    ----------
    count, features : int
        ``weight`` is (count, features), initially drawn from a normal distribution with standard deviation
        1/√features, so that rows have norm about 1.
    seed : int
        The same seed gives the same table on every backend.
    dtype : str
    backend, device : str, optional
        Where the parameters are and the layer computes; the default is the selection in force, else NumPy.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError, UnknownBackendError, BackendUnavailableError

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> layer = pa.Embedding(10, 4, dtype="float64")
    >>> y, cache = layer.forward(np.array([[1, 3, 1]]))
    >>> _, grads = layer.backward(np.ones_like(y), cache)
    >>> y.shape, grads["weight"][:4, 0]
    ((1, 3, 4), array([0., 2., 0., 1.]))
    """

    def __init__(
        self, count: int, features: int, *, seed: int = 0, dtype: str = "float32", backend: str | None = None,
        device: str | None = None,
    ) -> None:  # fmt: skip
        self.count, self.features = checked_sizes(count=count, features=features)
        weight = generator(seed).standard_normal((self.count, self.features)) / math.sqrt(self.features)
        super().__init__({"weight": weight}, dtype, backend, device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        return {"count": self.count, "features": self.features}

    def __call__(self, indices: Array) -> Array:
        """Return the rows (…, features) of indices (…), without a cache."""
        return self._call({"indices": indices}, in_range=checked_indices(indices, self.count))

    def forward(self, indices: Array) -> tuple[Array, Cache]:
        """Return ``(y, cache)``."""
        return self._call_with_cache({"indices": indices}, in_range=checked_indices(indices, self.count))

    def backward(self, dy: Array, cache: Cache) -> tuple[EmbeddingInputs, dict[str, Array]]:
        """Return None for the indices, and {weight}: for each row the sum of dy over the indices that selected it."""
        return self._call_backward(dy, cache)

    def native_forward(self, backend: Backend, indices: Array, *, in_range: bool) -> tuple[Array, _embedding.Saved]:
        """Return the rows of the indices."""
        return _embedding.forward(backend, indices, self._parameters["weight"], count=self.count, in_range=in_range)

    def native_backward(
        self, backend: Backend, dy: Array, saved: _embedding.Saved
    ) -> tuple[EmbeddingInputs, dict[str, Array]]:
        """Return the gradients of the input and the parameters."""
        _, dweight = _embedding.backward(backend, dy, saved)
        return EmbeddingInputs(None), {"weight": dweight}
