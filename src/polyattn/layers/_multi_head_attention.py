"""Multi-head attention: a layer of four projections around attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..backend import Array, Cache, Place
from ..errors import ArgumentError, ShapeError
from ..functional import _attention_weights, _linear
from ..functional._arguments import ARRAYS, checked, expect_broadcastable, expect_keywords
from ..functional._norms import checked_eps
from ..functional._operation import Operation, expect_rank, is_number
from ..kernels._static import concrete
from . import _decode, _heads, _multi_head, _norm
from ._decode import KeyValues
from ._heads import Outline, Plan, checked_positions, checked_rotary, expect_matching, sources
from ._initial import checked_sizes, generator, initial_weight
from ._layer import Layer
from ._multi_head import start_of, with_sinks
from ._scaled_dot_product_attention import AttentionInputs

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(Layer):
    """Attention in several learnt subspaces at once (Vaswani et al., 2017, section 3.2.2).

    Parameters
    ----------
    d_model : int
        Width of the inputs and of the result.
    d_key, d_value : int, optional
        Widths of ``key`` and ``value``, where they differ: of another modality, for instance.
    num_heads : int
        Heads of the queries, H.
    num_kv_heads : int, optional
        Heads of keys and values, a divisor of H; default H.
    head_dim : int, optional
        d_k of each head; default d_model / num_heads.
    value_dim : int, optional
        d_v of each head; default ``head_dim``.
    bias : bool
        Whether the four projections have biases; they start at zero.
    scale : float or "model", optional
        Of the scores: default 1/√d_k; "model" is 1/√d_model.
    rotary : bool or dict
        Whether queries and keys are turned by their positions, and how: the settings ``base``, ``dim``,
        ``interleaved`` and ``scaling`` of :func:`polyattn.functional.rotary_embedding`. Keys stand at 0, 1, …,
        queries from ``q_offset`` on, unless ``positions`` are given at the call.
    qk_norm : {"rms", "layer"}, optional
        Normalise each head of queries and keys before they are turned, with a learnt gain.
    qk_norm_eps : float
        Added to the mean square or the variance, inside the root.
    sinks : bool
        Whether each head has a learnt sink, a logit that takes weight and gives no value; they start at zero.
    window : (left, right), optional
        How far a query sees where the call does not say.
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
        Among others where ``num_heads`` does not divide ``d_model`` and no ``head_dim`` is given.

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

    _operation = Operation("MultiHeadAttention", _multi_head.forward, _multi_head.backward, _multi_head.prepare)
    _slots = _multi_head.PARAMETERS

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
        self.rotary, self._rotation = checked_rotary(rotary, self.head_dim)
        self.qk_norm = None if qk_norm is None else _norm.checked_norm("qk_norm", qk_norm)
        self.qk_norm_eps = checked_eps(qk_norm_eps)
        self.window = None if window is None else checked(*(Outline((1, 1), "float32"),) * 3, window=window)[1].window
        super().__init__(self._initial(init, seed), dtype, backend, device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that make a layer of the same architecture."""
        names = (
            "d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim", "d_key", "d_value", "bias", "scale",
            "rotary", "qk_norm", "qk_norm_eps", "sinks", "window",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __call__(self, query: Array, key: Array | None = None, value: Array | None = None, **arguments: Any) -> Array:
        """Return the layer's result, and keep nothing.

        Parameters
        ----------
        query : array (…, n_q, d_model)
            Alone: self-attention.
        key : array (…, n_k, d_key), optional
            What is attended to; alone it gives the values as well.
        value : array (…, n_k, d_value), optional
        **arguments
            As in :func:`polyattn.attention`, without scale and backend, and without sinks where the layer has its
            own. With rotary also ``positions``: integers (…, n) of the rows of ``query``, or a pair of those of
            ``query`` and those of ``key``.

        Returns
        -------
        array (…, n_q, d_model)
        """
        return self._call(*self._sorted(query, key, value, arguments))

    def forward(
        self, query: Array, key: Array | None = None, value: Array | None = None, **arguments: Any
    ) -> tuple[Array, Cache]:
        """Return ``(y, cache)``; arguments as when the layer is called."""
        return self._record(*self._sorted(query, key, value, arguments))

    def backward(self, dy: Array, cache: Cache, *, inputs: bool = True) -> tuple[AttentionInputs, dict[str, Array]]:
        """Return the gradients of the inputs and, by name, of the parameters.

        An input that served for two or three of query, key and value has the sum over its paths, under the
        first name; the other names are None. Parameter gradients are summed over batch and sequence.
        ``inputs=False``, for the first layer of a model, leaves out those of query, key and value: they are None.
        """
        dinputs, grads = self._pull(dy, cache, AttentionInputs._fields, inputs=inputs)
        return AttentionInputs(*dinputs), {name: grads[name] for name in self._parameters}

    def decode(self, query: Array, cache: KeyValues, **arguments: Any) -> tuple[Array, KeyValues]:
        """Return the result for the next positions of a text, and the cache with their keys and values.

        Parameters
        ----------
        query : array (B, n, d_model)
            They stand at ``cache.position``, in each entry of the batch.
        cache : KVCache, PagedKVCache or SlidingKVCache
            With ``num_kv_heads``, ``head_dim``, ``value_dim`` and the dtype of the layer, on its backend. It is
            consumed.
        **arguments
            Of the cache's ``attention``: softcap, mask, …; causal is True. Arrays are of the layer's library.

        Returns
        -------
        array (B, n, d_model), and the cache
            Token by token what the layer's call with ``causal=True`` gives of the whole. No gradient is recorded.
        """
        arguments = self._decoding(cache, self._place, arguments)
        self._expect_inputs(query, None, None)
        trip, native = self._embark({"query": query}), self._place.backend
        with native.scope():
            y, following = _decode.attend(native, trip.arrays[0], self._parameters, cache, self._plan(), arguments)
        return trip.back(y, "MultiHeadAttention"), following

    def attention_weights(self, query: Array, key: Array | None = None, **arguments: Any) -> Array:
        """Return the weights (…, H, n_q, n_k) that each head gives, before dropout; for looking at."""
        inputs, static = self._sorted(query, key, None, arguments)
        trip = self._embark(inputs)
        native, parameters = self._place.backend, self._parameters
        settings = static["settings"]._replace(device=self._place.device)
        (query, key, _), (*extras, q_at, k_at) = trip.arrays[:3], trip.arrays[3:]
        of_key, _ = sources(query, key, None, False)
        plan, start = static["plan"], start_of(settings, tuple(extras))
        with native.scope():
            heads = []
            for name, x, count, at, first in (
                ("q", query, self.num_heads, q_at, start), ("k", of_key, self.num_kv_heads, k_at, 0)
            ):  # fmt: skip
                weight, bias = parameters[f"{name}_proj.weight"], parameters.get(f"{name}_proj.bias")
                projected, _ = _linear.forward(native, x, weight, bias)
                gain = parameters.get(f"{name}_norm.weight")
                heads.append(_heads.forward(native, projected, count, gain, at, first, plan)[0])
            others = with_sinks(tuple(extras), parameters.get("sinks"))
            weights, _ = _attention_weights.forward(native, *heads, None, *others, settings=settings)
        return trip.back(weights, "attention_weights")

    def _initial(self, init: str, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        rng, width = generator(seed), self.d_model
        sizes = {
            "q_proj": (width, self.num_heads * self.head_dim),
            "k_proj": (self.d_key, self.num_kv_heads * self.head_dim),
            "v_proj": (self.d_value, self.num_kv_heads * self.value_dim),
            "out_proj": (self.num_heads * self.value_dim, width),
        }
        parameters = {}
        for name, (fan_in, fan_out) in sizes.items():
            parameters[f"{name}.weight"] = initial_weight(rng, init, fan_in, fan_out)
            if self.bias:
                parameters[f"{name}.bias"] = np.zeros(fan_out)
        if self.qk_norm is not None:
            parameters |= {name: np.ones(self.head_dim) for name in ("q_norm.weight", "k_norm.weight")}
        if self.sinks:
            parameters["sinks"] = np.zeros(self.num_heads)
        return parameters

    def _sorted(
        self, query: Array, key: Array | None, value: Array | None, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check the call, and return its arrays in the operation's order and its static settings."""
        positions = arguments.pop("positions", None)
        expect_keywords(type(self).__name__, arguments, "scale", *(("sinks",) if self.sinks else ()))
        key, value, value_is_query = self._expect_inputs(query, key, value)
        of_key, of_value = sources(query, key, value, value_is_query)
        q_positions, k_positions = checked_positions(positions, query, key, self._rotation is not None)
        arrays, settings = checked(
            self._outline(query, self.num_heads, self.head_dim),
            self._outline(of_key, self.num_kv_heads, self.head_dim),
            self._outline(of_value, self.num_kv_heads, self.value_dim),
            scale=self._scale(),
            **{"window": self.window, **arguments},
        )
        if self._rotation is not None and positions is None and arrays["q_offset"] is not None:
            expect_broadcastable("q_offset", arrays["q_offset"], tuple(query.shape[:-2]), "query's leading axes")
        extras = {name: arrays[name] for name in ARRAYS[3:]}
        places = {"positions": q_positions, "positions of the key": k_positions}
        inputs = {"query": query, "key": key, "value": value, **extras, **places}
        return inputs, {"settings": settings, "plan": self._plan(value_is_query)}

    def _plan(self, value_is_query: bool = False) -> Plan:
        return Plan(
            self.num_heads, self.num_kv_heads, value_is_query, self.qk_norm, concrete(self.qk_norm_eps),
            concrete(self._rotation),
            self.sinks,
        )  # fmt: skip

    def _scale(self) -> float | None:
        return 1 / math.sqrt(self.d_model) if isinstance(self.scale, str) else self.scale

    def _decoding(self, cache: Any, place: Place, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check what the layer is to decode with, and return the arguments of the cache's attention."""
        own = _decode.checked_arguments(type(self).__name__, cache, place, arguments, self.window, self.sinks)
        return {**own, "scale": self._scale()}

    def _expect_inputs(
        self, query: Array, key: Array | None, value: Array | None
    ) -> tuple[Array | None, Array | None, bool]:
        """Check the inputs; return key and value, None for one given before, and whether the value is the query."""
        expect_rank("query", query, 2)
        key = None if key is query else key
        of_key, of_value = sources(query, key, value, False)
        value_is_query = of_value is query
        value = None if value_is_query or of_value is of_key else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x is not None:
                self._expect_dtype(**{name: x})
                expect_rank(name, x, 2)
        widths = {"query": (query, self.d_model), "key": (of_key, self.d_key), "value": (of_value, self.d_value)}
        for name, (x, width) in widths.items():
            if x.shape[-1] != width:
                raise ShapeError(f"{name}: expected (…, n, {width}), got {tuple(x.shape)}")
        expect_matching(query, of_key, of_value)
        return key, value, value_is_query

    @staticmethod
    def _outline(x: Array, heads: int, dim: int) -> Outline:
        return Outline((*x.shape[:-2], heads, x.shape[-2], dim), x.dtype)
