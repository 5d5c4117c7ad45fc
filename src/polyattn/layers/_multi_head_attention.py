"""Multi-head attention: projections to queries, keys and values, attention, output projection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..backend import Array, Backend, Cache
from ..errors import ArgumentError, ShapeError
from ..functional import _attention, _attention_weights, _linear
from ..functional._arguments import checked_window
from ..functional._checks import is_number
from ..functional._norms import checked_eps
from ..kv_cache import KVCache, PagedKVCache, SlidingKVCache
from . import _heads
from ._heads import join_heads, split_heads
from ._initial import checked_sizes, generator
from ._layer import Layer, named
from ._layer_norm import LayerNorm
from ._multi_head_arguments import (
    Inputs,
    checked_arguments,
    checked_decoding,
    checked_inputs,
    checked_norm,
    checked_rotary,
)
from ._projection import Projection
from ._rms_norm import RMSNorm
from ._scaled_dot_product_attention import AttentionInputs

__all__ = ["MultiHeadAttention"]

KeyValues = TypeVar("KeyValues", KVCache, PagedKVCache, SlidingKVCache)


class Saved(NamedTuple):
    """What the backward needs."""

    q_proj: _linear.Saved
    k_proj: _linear.Saved
    v_proj: _linear.Saved
    q_heads: _heads.Saved
    k_heads: _heads.Saved
    attention: _attention.Saved
    out_proj: _linear.Saved
    value_is_query: bool
    key_is_query: bool
    value_is_key: bool

    @property
    def kernel_name(self) -> str:
        """The name of the attention kernel."""
        return self.attention.kernel_name


class MultiHeadAttention(Layer):
    """Multi-head attention (Vaswani et al., 2017, section 3.2.2).

    Parameters
    ----------
    d_model : int
        Width of the inputs and of the result.
    d_key, d_value : int, optional
        Widths of ``key`` and ``value``, for instance of another modality; default d_model.
    num_heads : int
        Number of query heads, H.
    num_kv_heads : int, optional
        Number of key and value heads, a divisor of H; default H.
    head_dim : int, optional
        d_k of each head; default d_model / num_heads.
    value_dim : int, optional
        d_v of each head; default ``head_dim``.
    bias : bool
        Whether the four projections have biases, initially zero.
    scale : float or "model", optional
        The factor of the scores: default 1/√d_k; "model" is 1/√d_model.
    rotary : bool or dict
        Whether queries and keys have a rotary embedding; a dict has some of the settings ``base``, ``dim``,
        ``interleaved`` and ``scaling`` of :func:`polyattn.functional.rotary_embedding`. The keys have the positions
        0, 1, … and the queries those from ``q_offset`` on, unless ``positions`` are given in a call.
    qk_norm : {"rms", "layer"}, optional
        Normalise each head of queries and keys before the rotation, with a learnt gain.
    qk_norm_eps : float
        Added to the mean square or the variance, inside the root.
    sinks : bool
        Whether each head has a learnt sink, a score that takes weight and has no value; initially zero.
    window : (left, right), optional
        The default of ``window`` in a call.
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
        Among others if ``num_heads`` does not divide ``d_model`` and no ``head_dim`` is given.

    Notes
    -----
    Parameters: ``q_proj.weight`` (d_model, H·d_k), ``k_proj.weight`` (d_key, H_kv·d_k), ``v_proj.weight``
    (d_value, H_kv·d_v), ``out_proj.weight`` (H·d_v, d_model), and a ``.bias`` of each; with the options
    ``q_norm.weight`` and ``k_norm.weight`` (d_k,), and ``sinks`` (H,).
    Rotary: Su et al. (2021). Query-key norm: Henry et al., "Query-key normalization for transformers" (2020), here
    with gains as in Qwen3 and Gemma 3. Sinks: Xiao et al. (2023), as in gpt-oss.

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> mha = pa.MultiHeadAttention(d_model=16, num_heads=4, dtype="float64")
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 16))
    >>> y, cache = mha.forward(x, causal=True)
    >>> inputs, grads = mha.backward(np.ones_like(y), cache)
    >>> y.shape, inputs.query.shape, grads["q_proj.weight"].shape
    ((2, 5, 16), (2, 5, 16), (16, 16))
    """

    def __init__(
        self, d_model: int = 512, num_heads: int = 8, num_kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, *, d_key: int | None = None, d_value: int | None = None, bias: bool = True,
        scale: float | str | None = None, rotary: bool | Mapping[str, Any] | None = None, qk_norm: str | None = None,
        qk_norm_eps: float = 1e-6, sinks: bool = False, window: tuple[int | None, int | None] | None = None,
        init: str = "xavier_uniform", seed: int = 0, dtype: str = "float32", backend: str | None = None,
        device: str | None = None,
    ) -> None:  # fmt: skip
        d_model, num_heads = checked_sizes(d_model=d_model, num_heads=num_heads)
        if head_dim is None and d_model % num_heads:
            raise ShapeError(
                f"num_heads: expected a divisor of d_model={d_model}, got {num_heads}; or give head_dim as well"
            )
        self.d_model, self.num_heads = d_model, num_heads
        head_dim = d_model // num_heads if head_dim is None else head_dim
        self.d_key, self.d_value = checked_sizes(
            d_key=d_model if d_key is None else d_key, d_value=d_model if d_value is None else d_value
        )
        self.num_kv_heads, self.head_dim, self.value_dim = checked_sizes(
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
        )
        if num_heads % self.num_kv_heads:
            raise ShapeError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {self.num_kv_heads}")
        if scale not in (None, "model") and not (is_number(scale) and math.isfinite(float(scale))):
            raise ArgumentError(f"scale: expected a number, 'model' or None, got {scale!r}")
        self.bias, self.scale, self.sinks = bool(bias), scale, bool(sinks)
        self.rotary, self.rotation = checked_rotary(rotary, self.head_dim)
        self.qk_norm = None if qk_norm is None else checked_norm("qk_norm", qk_norm)
        self.qk_norm_eps = checked_eps(qk_norm_eps)
        self.window = None if window is None else checked_window(window)
        shared: dict[str, Any] = {"dtype": dtype, "backend": backend, "device": device}
        projection: dict[str, Any] = {"bias": bias, "init": init, "seed": generator(seed), **shared}
        self.q_proj = Projection(d_model, num_heads * self.head_dim, **projection)
        self.k_proj = Projection(self.d_key, self.num_kv_heads * self.head_dim, **projection)
        self.v_proj = Projection(self.d_value, self.num_kv_heads * self.value_dim, **projection)
        self.out_proj = Projection(num_heads * self.value_dim, d_model, **projection)
        self.q_norm, self.k_norm = (self._head_norm(**shared) for _ in "qk")
        super().__init__({"sinks": np.zeros(num_heads)} if sinks else {}, **shared)

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        names = (
            "d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim", "d_key", "d_value", "bias", "scale",
            "rotary", "qk_norm", "qk_norm_eps", "sinks", "window",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __call__(self, query: Array, key: Array | None = None, value: Array | None = None, **arguments: Any) -> Array:
        """Return the layer's result, without a cache.

        Parameters
        ----------
        query : array (…, n_q, d_model)
            Without key and value: self-attention.
        key : array (…, n_k, d_key), optional
            The input of the keys; without ``value`` also that of the values.
        value : array (…, n_k, d_value), optional
        **arguments
            As in :func:`polyattn.attention`, without scale and backend, and without sinks if the layer has its
            own. With rotary embedding also ``positions``: integers (…, n) for the rows of ``query``, or a pair of
            those for ``query`` and those for ``key``.

        Returns
        -------
        array (…, n_q, d_model)
        """
        arrays, options = checked_arguments(self, arguments, query, key, value)
        return self._call(arrays, **options)

    def forward(
        self, query: Array, key: Array | None = None, value: Array | None = None, **arguments: Any
    ) -> tuple[Array, Cache]:
        """Return ``(y, cache)``; arguments as in a call of the layer."""
        arrays, options = checked_arguments(self, arguments, query, key, value)
        return self._call_with_cache(arrays, **options)

    def backward(self, dy: Array, cache: Cache, *, inputs: bool = True) -> tuple[AttentionInputs, dict[str, Array]]:
        """Return the gradients of the inputs and, by name, of the parameters.

        An array that was given as two or three of query, key and value has the sum of their gradients under the
        first name; the others are None. Parameter gradients are summed over batch and sequence. With
        ``inputs=False``, for the first layer of a model, those of query, key and value are None and not computed.
        """
        return self._call_backward(dy, cache, inputs=inputs)

    def decode(self, query: Array, cache: KeyValues, **arguments: Any) -> tuple[Array, KeyValues]:
        """Return the result for the next positions of a sequence, and the cache with their keys and values.

        Parameters
        ----------
        query : array (B, n, d_model)
            Inputs of the positions from ``cache.position`` on, for each entry of the batch.
        cache : KVCache, PagedKVCache or SlidingKVCache
            With ``num_kv_heads``, ``head_dim``, ``value_dim`` and the dtype of the layer, at its place. The call
            consumes it.
        **arguments
            As in the cache's ``attention``: softcap, mask, …; causal is True. Arrays are of the layer's library.

        Returns
        -------
        array (B, n, d_model), and the cache
            The same result as a call of the layer with ``causal=True`` for the whole sequence. No gradient is
            recorded.
        """
        arguments = checked_decoding(self, cache, self._place, arguments)
        checked_inputs(self, query)
        placed, native = self._placed({"query": query}), self._place.backend
        with native.scope():
            y, following = self.native_decode(native, placed.arrays["query"], cache, arguments)
        return placed.to_input_device(y, "MultiHeadAttention"), following

    def attention_weights(self, query: Array, key: Array | None = None, **arguments: Any) -> Array:
        """Return the attention weights (…, H, n_q, n_k), before dropout, for inspection."""
        arrays, options = checked_arguments(self, arguments, query, key)
        placed, native = self._placed(arrays), self._place.backend
        with native.scope():
            weights = self._native_weights(native, **placed.arrays, **options)
        return placed.to_input_device(weights, "attention_weights")

    # ---- forward and backward ------------------------------------------------------------------------------------

    def native_forward(
        self, backend: Backend, query: Array, key: Array | None = None, value: Array | None = None, *,
        value_is_query: bool = False, positions: Array | None = None, key_positions: Array | None = None,
        **attention: Any,
    ) -> tuple[Array, Saved]:  # fmt: skip
        """Project, split into heads, attend, join the heads, project; return ``(y, saved)``."""
        xp, (of_key, of_value) = backend.namespace(), Inputs(query, key, value, value_is_query).sources
        q, q_proj = self.q_proj.native_forward(backend, query)  # (…, n_q, H·d_k)
        k, k_proj = self.k_proj.native_forward(backend, of_key)  # (…, n_k, H_kv·d_k)
        v, v_proj = self.v_proj.native_forward(backend, of_value)  # (…, n_k, H_kv·d_v)
        q, q_heads = self._q_heads(backend, q, positions, attention["q_offset"])  # (…, H, n_q, d_k)
        k, k_heads = self._k_heads(backend, k, key_positions, 0)  # (…, H_kv, n_k, d_k)
        v = split_heads(xp, v, self.num_kv_heads)  # (…, H_kv, n_k, d_v)
        out, of_attention = _attention.forward(backend, q, k, v, **self._parameters, **attention)  # (…, H, n_q, d_v)
        y, out_proj = self.out_proj.native_forward(backend, join_heads(xp, out))  # (…, n_q, d_model)
        out_proj = out_proj._replace(x=None)  # attention's result with joined heads
        shared = value_is_query, key is None, value is None
        return y, Saved(q_proj, k_proj, v_proj, q_heads, k_heads, of_attention, out_proj, *shared)

    def native_backward(
        self, backend: Backend, dy: Array, saved: Saved, *, inputs: bool = True
    ) -> tuple[AttentionInputs, dict[str, Array]]:
        """Compute the gradients in reverse order; without ``inputs`` those of query, key and value are None."""
        xp, out = backend.namespace(), saved.attention.out
        out_proj = saved.out_proj._replace(x=join_heads(xp, out))
        (djoined,), dout_proj = self.out_proj.native_backward(backend, dy, out_proj)
        dout = split_heads(xp, djoined, self.num_heads)  # (…, H, n_q, d_v)
        dq, dk, dv, dbias, dsinks = _attention.backward(backend, dout, saved.attention)
        dv = join_heads(xp, dv)  # (…, n_k, H_kv·d_v)
        dk, dk_norm = _heads.backward(backend, dk, saved.k_heads, self.k_norm)  # (…, n_k, H_kv·d_k)
        dq, dq_norm = _heads.backward(backend, dq, saved.q_heads, self.q_norm)  # (…, n_q, H·d_k)
        (dvalue,), dv_proj = self.v_proj.native_backward(backend, dv, saved.v_proj, inputs=inputs)
        (dkey,), dk_proj = self.k_proj.native_backward(backend, dk, saved.k_proj, inputs=inputs)
        (dquery,), dq_proj = self.q_proj.native_backward(backend, dq, saved.q_proj, inputs=inputs)
        if inputs:  # an array given for several inputs has the sum of their gradients
            if saved.value_is_query:
                dquery, dvalue = dquery + dvalue, None
            elif saved.value_is_key:
                dkey, dvalue = dkey + dvalue, None
            if saved.key_is_query:
                dquery, dkey = dquery + dkey, None
        grads = named(
            q_proj=dq_proj, k_proj=dk_proj, v_proj=dv_proj, out_proj=dout_proj, q_norm=dq_norm, k_norm=dk_norm
        )
        if self.sinks:
            grads["sinks"], dsinks = dsinks, None
        return AttentionInputs(dquery, dkey, dvalue, dbias, dsinks), grads

    def native_decode(
        self, backend: Backend, x: Array, cache: KeyValues, arguments: dict[str, Any]
    ) -> tuple[Array, KeyValues]:
        """Return the result for the next positions, and the cache with their keys and values."""
        xp, position = backend.namespace(), cache.position
        q, k, v = (proj.native_forward(backend, x)[0] for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, _ = self._q_heads(backend, q, None, position)  # (B, H, n, d_k)
        k, _ = self._k_heads(backend, k, None, position)  # (B, H_kv, n, d_k)
        following = cache.append(k, split_heads(xp, v, self.num_kv_heads))
        out = following.attention(q, **self._parameters, **arguments)  # (B, H, n, d_v)
        return self.out_proj.native_forward(backend, join_heads(xp, out))[0], following  # (B, n, d_model)

    def _native_weights(
        self, backend: Backend, query: Array, key: Array | None = None, *, positions: Array | None = None,
        key_positions: Array | None = None, value_is_query: bool = False, **attention: Any,
    ) -> Array:  # fmt: skip
        q, _ = self.q_proj.native_forward(backend, query)
        k, _ = self.k_proj.native_forward(backend, query if key is None else key)
        q, _ = self._q_heads(backend, q, positions, attention["q_offset"])  # (…, H, n_q, d_k)
        k, _ = self._k_heads(backend, k, key_positions, 0)  # (…, H_kv, n_k, d_k)
        return _attention_weights.forward(backend, q, k, **self._parameters, **attention)[0]

    def _q_heads(
        self, backend: Backend, q: Array, positions: Array | None, offset: int | Array
    ) -> tuple[Array, _heads.Saved]:
        return _heads.forward(backend, q, self.num_heads, self.q_norm, self.rotation, positions, offset)

    def _k_heads(
        self, backend: Backend, k: Array, positions: Array | None, offset: int | Array
    ) -> tuple[Array, _heads.Saved]:
        return _heads.forward(backend, k, self.num_kv_heads, self.k_norm, self.rotation, positions, offset)

    def _head_norm(self, **shared: Any) -> LayerNorm | RMSNorm | None:
        if self.qk_norm == "layer":
            return LayerNorm(self.head_dim, eps=self.qk_norm_eps, bias=False, **shared)
        return RMSNorm(self.head_dim, eps=self.qk_norm_eps, **shared) if self.qk_norm == "rms" else None

    def score_scale(self) -> float | None:
        """Return the factor of the scores; None is the default of attention."""
        return 1 / math.sqrt(self.d_model) if isinstance(self.scale, str) else self.scale
