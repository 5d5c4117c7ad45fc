"""Attention as a layer without parameters, bound to a place and with its own scale."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError
from ..functional import AttentionGrads, _attention
from ..functional._arguments import Arguments, checked_call, expect_keywords
from ..functional._checks import is_number
from ._layer import Layer

__all__ = ["AttentionInputs", "ScaledDotProductAttention"]


class AttentionInputs(NamedTuple):
    """The gradients of an attention layer's inputs; None for inputs not given or shared with an earlier one."""

    query: Array
    key: Array | None
    value: Array | None
    bias: Array | None
    sinks: Array | None


class ScaledDotProductAttention(Layer):
    """softmax(q kᵀ · scale) v as a layer: :func:`polyattn.attention`, bound to a place.

    Parameters
    ----------
    scale : float, optional
        Default 1/√d_k.
    dtype : str
        The dtype of the inputs.
    backend, device : str, optional
        Where the layer computes; the default is the selection in force, else NumPy.

    Raises
    ------
    ArgumentError, DTypeError, UnknownBackendError, BackendUnavailableError

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> layer = pa.ScaledDotProductAttention(dtype="float64")
    >>> out, cache = layer.forward(np.zeros((2, 4)), np.zeros((3, 4)), np.eye(3), causal=True)
    >>> out.round(3)
    array([[0.5  , 0.5  , 0.   ],
           [0.333, 0.333, 0.333]])
    """

    def __init__(
        self, *, scale: float | None = None, dtype: str = "float32", backend: str | None = None,
        device: str | None = None,
    ) -> None:  # fmt: skip
        if scale is not None and not (is_number(scale) and math.isfinite(scale)):
            raise ArgumentError(f"scale: expected a finite number or None, got {scale!r}")
        self.scale = scale
        super().__init__({}, dtype, backend, device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        return {"scale": self.scale}

    def __call__(self, q: Array, k: Array, v: Array, **arguments: Any) -> Array:
        """Return attention over q, k and v; keyword arguments as in :func:`polyattn.attention`."""
        arrays, options = self._checked(q, k, v, arguments)
        return self._call(arrays, **options)

    def forward(self, q: Array, k: Array, v: Array, **arguments: Any) -> tuple[Array, Cache]:
        """Return ``(out, cache)``."""
        arrays, options = self._checked(q, k, v, arguments)
        return self._call_with_cache(arrays, **options)

    def backward(self, dy: Array, cache: Cache) -> tuple[AttentionInputs, dict[str, Array]]:
        """Return the gradients of query, key, value, bias and sinks, and an empty dict of parameters.

        Each argument has its own gradient, also if one array was given for several.
        """
        grads, parameters = self._call_backward(dy, cache)
        return AttentionInputs(*grads), parameters

    def native_forward(
        self, backend: Backend, q: Array, k: Array, v: Array, **arguments: Any
    ) -> tuple[Array, _attention.Saved]:
        """Return attention over q, k and v."""
        return _attention.forward(backend, q, k, v, **arguments)

    def native_backward(
        self, backend: Backend, dy: Array, saved: _attention.Saved
    ) -> tuple[AttentionGrads, dict[str, Array]]:
        """Return the gradients of the inputs, and no parameters'."""
        return _attention.backward(backend, dy, saved), {}

    def _checked(self, q: Array, k: Array, v: Array, arguments: dict[str, Any]) -> Arguments:
        expect_keywords(type(self).__name__, arguments)
        self._expect_dtype(q=q, k=k, v=v)
        return checked_call(q, k, v, **{"scale": self.scale, **arguments})
