"""Multi-head attention: four projections around attention, and its backward through every path."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend import Array, Backend, Cache, Place
from ..errors import ArgumentError, ShapeError
from ..functional import _attention, _attention_weights, _linear
from ..functional._arguments import ARRAYS, Settings, checked, expect_keywords
from ..functional._operation import Operation, expect_rank, is_number
from ._initial import checked_sizes, generator, initial_weight
from ._layer import Layer
from ._scaled_dot_product_attention import AttentionInputs

__all__ = ["MultiHeadAttention"]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
EXTRAS = len(ARRAYS) - 3  # what attention takes besides q, k and v


@dataclass(frozen=True)
class _Outline:
    """Shape and dtype of an array that is not computed yet, so that arguments are checked at the call."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)


def forward(
    backend: Backend, query: Array, key: Array | None, value: Array | None, *rest: Array, settings: Settings,
    heads: int, kv_heads: int, value_is_query: bool,
) -> tuple[Array, tuple[Any, ...]]:  # fmt: skip
    """Project, split into heads, attend, join the heads, project."""
    xp, extras, parameters = backend.namespace(), rest[:EXTRAS], rest[EXTRAS:]
    q_w, k_w, v_w, out_w, q_b, k_b, v_b, out_b = parameters
    of_key, of_value = sources(query, key, value, value_is_query)
    q, _ = _linear.forward(backend, query, q_w, q_b)  # (…, n_q, H·d_k)
    k, _ = _linear.forward(backend, of_key, k_w, k_b)  # (…, n_k, H_kv·d_k)
    v, _ = _linear.forward(backend, of_value, v_w, v_b)  # (…, n_k, H_kv·d_v)
    q, k, v = split_heads(xp, q, heads), split_heads(xp, k, kv_heads), split_heads(xp, v, kv_heads)
    out, attention_saved = _attention.forward(backend, q, k, v, *extras, settings=settings)  # (…, H, n_q, d_v)
    y, _ = _linear.forward(backend, join_heads(xp, out), out_w, out_b)  # (…, n_q, d_model)
    return y, (query, key, value, *parameters, *attention_saved)


def backward(
    backend: Backend, dy: Array, saved: tuple[Any, ...], *, settings: Settings, heads: int, kv_heads: int,
    value_is_query: bool, inputs: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """Reverse each line; the gradients of query, key and value, then attention's, then the parameters'."""
    xp, (query, key, value), parameters, attention_saved = backend.namespace(), saved[:3], saved[3:11], saved[11:]
    q_w, k_w, v_w, out_w, q_b, k_b, v_b, out_b = parameters
    # y = join(out) W + b
    out = attention_saved[-2]
    djoined, dout_w, dout_b = _linear.backward(backend, dy, (join_heads(xp, out), out_w, out_b))
    dout = split_heads(xp, djoined, heads)  # (…, H, n_q, d_v)
    dq, dk, dv, *dextras = _attention.backward(backend, dout, attention_saved, settings=settings)
    # q, k, v = query W + b, key W + b, value W + b
    dq, dk, dv = join_heads(xp, dq), join_heads(xp, dk), join_heads(xp, dv)
    of_key, of_value = sources(query, key, value, value_is_query)
    dquery, dq_w, dq_b = _linear.backward(backend, dq, (query, q_w, q_b), inputs=inputs)
    dkey, dk_w, dk_b = _linear.backward(backend, dk, (of_key, k_w, k_b), inputs=inputs)
    dvalue, dv_w, dv_b = _linear.backward(backend, dv, (of_value, v_w, v_b), inputs=inputs)
    if inputs:  # each has the sum over the paths that used it
        if value is None and value_is_query:
            dquery, dvalue = dquery + dvalue, None
        elif value is None:
            dkey, dvalue = dkey + dvalue, None
        if key is None:
            dquery, dkey = dquery + dkey, None
    return (dquery, dkey, dvalue, *dextras, dq_w, dk_w, dv_w, dout_w, dq_b, dk_b, dv_b, dout_b)


def sources(query: Array, key: Array | None, value: Array | None, value_is_query: bool) -> tuple[Array, Array]:
    """Return what keys and values are made of: a key that is None is the query, a value the query or the key."""
    key = query if key is None else key
    return key, value if value is not None else query if value_is_query else key


def split_heads(xp: Any, x: Array, heads: int) -> Array:
    """(…, n, H·d) → (…, H, n, d)."""
    x = xp.reshape(x, (*x.shape[:-1], heads, x.shape[-1] // heads))
    lead = tuple(range(x.ndim - 3))
    return xp.permute_dims(x, (*lead, x.ndim - 2, x.ndim - 3, x.ndim - 1))


def join_heads(xp: Any, x: Array) -> Array:
    """(…, H, n, d) → (…, n, H·d)."""
    lead = tuple(range(x.ndim - 3))
    x = xp.permute_dims(x, (*lead, x.ndim - 2, x.ndim - 3, x.ndim - 1))
    return xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def _expect_matching(query: Array, key: Array, value: Array) -> None:
    """Require what attention requires of q, k and v, under the names and in the shapes that the caller knows."""
    if value.shape[-2] != key.shape[-2]:
        raise ShapeError(f"value: expected key's n_k={key.shape[-2]} rows, got {tuple(value.shape)}")
    try:
        np.broadcast_shapes(*(tuple(x.shape[:-2]) for x in (query, key, value)))
    except ValueError:
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        raise ShapeError(f"expected leading axes that broadcast, got {shapes}") from None


def prepare(place: Place, arrays: tuple[Any, ...], static: dict[str, Any]) -> dict[str, Any]:
    """Choose the attention kernel, from the problem's sizes and the inputs' dtype."""
    return {**static, **_attention.prepare(place, arrays, {"settings": static["settings"]})}


class MultiHeadAttention(Layer):
    """Attention in several learnt subspaces at once (Vaswani et al., 2017, section 3.2.2).

    Parameters
    ----------
    d_model : int
        Width of the inputs and of the result.
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
    Parameters: ``q_proj.weight`` (d_model, H·d_k), ``k_proj.weight`` (d_model, H_kv·d_k), ``v_proj.weight``
    (d_model, H_kv·d_v), ``out_proj.weight`` (H·d_v, d_model), and a ``.bias`` of each.

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

    _operation = Operation("MultiHeadAttention", forward, backward, prepare)
    _slots = (*(f"{name}.weight" for name in PROJECTIONS), *(f"{name}.bias" for name in PROJECTIONS))

    def __init__(
        self, d_model: int = 512, num_heads: int = 8, num_kv_heads: int | None = None, head_dim: int | None = None,
        value_dim: int | None = None, *, bias: bool = True, scale: float | str | None = None,
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
        self.num_kv_heads, self.head_dim, self.value_dim = checked_sizes(
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            value_dim=head_dim if value_dim is None else value_dim,
        )
        if num_heads % self.num_kv_heads:
            raise ShapeError(f"num_kv_heads: expected a divisor of num_heads={num_heads}, got {self.num_kv_heads}")
        if scale not in (None, "model") and not (is_number(scale) and math.isfinite(float(scale))):
            raise ArgumentError(f"scale: expected a number, 'model' or None, got {scale!r}")
        self.bias, self.scale = bool(bias), scale
        super().__init__(self._initial(init, seed), dtype, backend, device)

    def config(self) -> dict[str, Any]:
        """Return the arguments that make a layer of the same architecture."""
        names = ("d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim", "bias", "scale")
        return {name: getattr(self, name) for name in names}

    def __call__(self, query: Array, key: Array | None = None, value: Array | None = None, **arguments: Any) -> Array:
        """Return the layer's result, and keep nothing.

        Parameters
        ----------
        query : array (…, n_q, d_model)
            Alone: self-attention.
        key : array (…, n_k, d_model), optional
            What is attended to; alone it gives the values as well.
        value : array (…, n_k, d_model), optional
        **arguments
            As in :func:`polyattn.attention`, without scale and backend.

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

    def attention_weights(self, query: Array, key: Array | None = None, **arguments: Any) -> Array:
        """Return the weights (…, H, n_q, n_k) that each head gives, before dropout; for looking at."""
        inputs, static = self._sorted(query, key, None, arguments)
        trip = self._embark(inputs)
        native, parameters = self._place.backend, self._parameters
        settings = static["settings"]._replace(device=self._place.device)
        query, key, _, *extras = trip.arrays
        of_key, _ = sources(query, key, None, False)
        xp = native.namespace()
        with native.scope():
            heads = []
            for name, x, count in (("q", query, self.num_heads), ("k", of_key, self.num_kv_heads)):
                weight, bias = parameters[f"{name}_proj.weight"], parameters.get(f"{name}_proj.bias")
                heads.append(split_heads(xp, _linear.forward(native, x, weight, bias)[0], count))
            weights, _ = _attention_weights.forward(native, *heads, None, *extras, settings=settings)
        return trip.back(weights, "attention_weights")

    def _initial(self, init: str, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        rng, width = generator(seed), self.d_model
        sizes = {
            "q_proj": (width, self.num_heads * self.head_dim),
            "k_proj": (width, self.num_kv_heads * self.head_dim),
            "v_proj": (width, self.num_kv_heads * self.value_dim),
            "out_proj": (self.num_heads * self.value_dim, width),
        }
        parameters = {}
        for name, (fan_in, fan_out) in sizes.items():
            parameters[f"{name}.weight"] = initial_weight(rng, init, fan_in, fan_out)
            if self.bias:
                parameters[f"{name}.bias"] = np.zeros(fan_out)
        return parameters

    def _sorted(
        self, query: Array, key: Array | None, value: Array | None, arguments: dict[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check the call, and return its arrays in the operation's order and its static settings."""
        expect_keywords(type(self).__name__, arguments, "scale")
        expect_rank("query", query, 2)
        key = None if key is query else key
        of_key, of_value = sources(query, key, value, False)
        value_is_query = of_value is query
        value = None if value_is_query or of_value is of_key else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x is not None:
                self._expect_dtype(**{name: x})
                expect_rank(name, x, 2)
                if x.shape[-1] != self.d_model:
                    raise ShapeError(f"{name}: expected (…, n, {self.d_model}), got {tuple(x.shape)}")
        _expect_matching(query, of_key, of_value)
        arrays, settings = checked(
            self._outline(query, self.num_heads, self.head_dim),
            self._outline(of_key, self.num_kv_heads, self.head_dim),
            self._outline(of_value, self.num_kv_heads, self.value_dim),
            scale=1 / math.sqrt(self.d_model) if isinstance(self.scale, str) else self.scale,
            **arguments,
        )
        extras = {name: arrays[name] for name in ARRAYS[3:]}
        static = {
            "settings": settings, "heads": self.num_heads, "kv_heads": self.num_kv_heads,
            "value_is_query": value_is_query,
        }  # fmt: skip
        return {"query": query, "key": key, "value": value, **extras}, static

    @staticmethod
    def _outline(x: Array, heads: int, dim: int) -> _Outline:
        return _Outline((*x.shape[:-2], heads, x.shape[-2], dim), x.dtype)
