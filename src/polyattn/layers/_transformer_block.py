"""One block of a transformer: attention and a feed-forward layer, each with a norm and a way around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..backend import Array, Backend, Cache, Place
from ..functional._arguments import ARRAYS, Settings
from ..functional._norms import checked_eps
from ..functional._operation import Operation, expect_rank
from ..kernels._static import concrete
from . import _decode, _feed_forward, _multi_head, _norm
from ._decode import KeyValues
from ._feed_forward import FeedForward
from ._heads import Plan
from ._initial import checked_sizes, generator
from ._layer import Layer
from ._multi_head_attention import MultiHeadAttention

__all__ = ["TransformerBlock", "TransformerBlockInputs"]

CALLED = len(ARRAYS) - 3 + 2  # what a call gives besides x: attention's other arrays, and two of positions
HEADS = len(_multi_head.PARAMETERS)


class TransformerBlockInputs(NamedTuple):
    """The gradients of a :class:`TransformerBlock`'s inputs; None for what was not given."""

    x: Array | None
    bias: Array | None
    sinks: Array | None


class Around(NamedTuple):
    """The static arguments of the ways around: which norm, and where it stands."""

    norm_first: bool
    norm: str
    eps: float


def forward(
    backend: Backend, x: Array, *rest: Array, settings: Settings, plan: Plan, activation: str, around: Around
) -> tuple[Array, tuple[Any, ...]]:
    """Go around attention, then around the feed-forward layer."""
    called, (norm1_w, norm1_b, norm2_w, norm2_b, *parameters) = rest[:CALLED], rest[CALLED:]
    of_attention, of_feed_forward = parameters[:HEADS], parameters[HEADS:]

    def attend(x: Array) -> tuple[Array, tuple[Any, ...]]:
        return _multi_head.forward(backend, x, None, None, *called, *of_attention, settings=settings, plan=plan)

    def feed(h: Array) -> tuple[Array, tuple[Any, ...]]:
        return _feed_forward.forward(backend, h, *of_feed_forward, activation=activation)

    h, norm1_saved, attention_saved = residual(backend, x, norm1_w, norm1_b, attend, around)  # (…, n, d_model)
    y, norm2_saved, feed_saved = residual(backend, h, norm2_w, norm2_b, feed, around)  # (…, n, d_model)
    return y, (*norm1_saved, *norm2_saved, *attention_saved, *feed_saved)


def backward(
    backend: Backend, dy: Array, saved: tuple[Any, ...], *, settings: Settings, plan: Plan, activation: str,
    around: Around, inputs: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """Reverse each line; the gradient of x, then attention's, then the parameters'."""
    norms_saved, saved = saved[: 2 * _norm.SAVED], saved[2 * _norm.SAVED :]
    norm1_saved, norm2_saved = norms_saved[: _norm.SAVED], norms_saved[_norm.SAVED :]
    attention_saved, feed_saved = saved[: _multi_head.SAVED], saved[_multi_head.SAVED :]

    def attend_backward(dout: Array) -> tuple[Any, ...]:
        wanted = inputs or around.norm_first  # the norm before it has parameters
        return _multi_head.backward(backend, dout, attention_saved, settings=settings, plan=plan, inputs=wanted)

    def feed_backward(dout: Array) -> tuple[Any, ...]:
        return _feed_forward.backward(backend, dout, feed_saved, activation=activation)

    # y = around(h, feed)
    dh, dnorm2, dfeed = residual_backward(backend, dy, norm2_saved, feed_backward, around)
    # h = around(x, attend)
    dx, dnorm1, (_, _, *dattention) = residual_backward(backend, dh, norm1_saved, attend_backward, around)
    dcalled, dattention = dattention[:CALLED], dattention[CALLED:]
    return (dx if inputs else None, *dcalled, *dnorm1, *dnorm2, *dattention, *dfeed)


def residual(
    backend: Backend, x: Array, weight: Array | None, bias: Array | None,
    inner: Callable[[Array], tuple[Array, tuple[Any, ...]]], around: Around,
) -> tuple[Array, tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Return x + inner(norm(x)) or norm(x + inner(x)), and what the norm and the inner layer saved."""
    if around.norm_first:
        normed, norm_saved = _norm.forward(backend, x, weight, bias, norm=around.norm, eps=around.eps)
        out, saved = inner(normed)
        return x + out, norm_saved, saved
    out, saved = inner(x)
    y, norm_saved = _norm.forward(backend, x + out, weight, bias, norm=around.norm, eps=around.eps)
    return y, norm_saved, saved


def residual_backward(
    backend: Backend, dy: Array, norm_saved: tuple[Any, ...], inner_backward: Callable[[Array], tuple[Any, ...]],
    around: Around,
) -> tuple[Any, tuple[Array | None, Array | None], tuple[Any, ...]]:  # fmt: skip
    """Return the gradients of x (None where the inner layer's is), of the norm's parameters, of the inner layer's."""
    if around.norm_first:
        # y = x + out; out = inner(normed); normed = norm(x)
        dnormed, *dinner = inner_backward(dy)
        dx, dweight, dbias = _norm.backward(backend, dnormed, norm_saved, norm=around.norm, eps=around.eps)
        return dy + dx, (dweight, dbias), tuple(dinner)
    # y = norm(total); total = x + out; out = inner(x)
    dtotal, dweight, dbias = _norm.backward(backend, dy, norm_saved, norm=around.norm, eps=around.eps)
    dx, *dinner = inner_backward(dtotal)
    return None if dx is None else dtotal + dx, (dweight, dbias), tuple(dinner)


def prepare(place: Place, arrays: tuple[Any, ...], static: dict[str, Any]) -> dict[str, Any]:
    """Choose the attention kernel."""
    x, *called = arrays
    return _multi_head.prepare(place, (x, None, None, *called), static)


class TransformerBlock(Layer):
    """Self-attention and a feed-forward layer, each with a norm and a residual connection around it.

    Parameters
    ----------
    d_model : int
        Width of the input and of the result.
    num_heads : int
        Heads of the queries.
    hidden : int, optional
        Between the projections of the feed-forward layer; default 4 · d_model.
    norm_first : bool
        Where the norms stand: True is pre-norm, x + f(norm(x)), False post-norm, norm(x + f(x)), as in the original
        transformer.
    norm : {"layer", "rms"}
        LayerNorm, with a shift if there are biases, or RMSNorm.
    eps : float
        Of the norms.
    activation : {"gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"}
        As of :class:`FeedForward`.
    bias : bool
        Whether projections and layer norms have biases; they start at zero.
    init : {"xavier_uniform", "normal"}
        Distribution of the weights, as of :class:`MultiHeadAttention`.
    seed : int
        The same seed gives the same parameters on every backend.
    dtype : str
    backend, device : str, optional
        Where the parameters live and the layer computes.
    **attention
        Other options of :class:`MultiHeadAttention`: num_kv_heads, head_dim, value_dim, scale, rotary, qk_norm,
        qk_norm_eps, sinks and window.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError, UnknownBackendError, BackendUnavailableError

    Notes
    -----
    Parameters: those of the parts by dotted names, ``norm1.weight``, ``attention.q_proj.weight``, …,
    ``norm2.weight``, ``feed_forward.up_proj.weight``, ….
    Vaswani et al., "Attention is all you need" (2017); Xiong et al., "On layer normalization in the transformer
    architecture" (2020).

    Examples
    --------
    >>> import numpy as np, polyattn as pa
    >>> block = pa.TransformerBlock(16, 4, norm="rms", activation="swiglu", bias=False, rotary=True, dtype="float64")
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 16))
    >>> y, cache = block.forward(x, causal=True)
    >>> inputs, grads = block.backward(np.ones_like(y), cache)
    >>> inputs.x.shape, grads["feed_forward.gate_proj.weight"].shape
    ((2, 5, 16), (16, 64))
    """

    _operation = Operation("TransformerBlock", forward, backward, prepare)
    _slots = (
        "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias",
        *(f"attention.{name}" for name in _multi_head.PARAMETERS),
        *(f"feed_forward.{name}" for name in FeedForward._slots),
    )  # fmt: skip

    def __init__(
        self, d_model: int, num_heads: int, hidden: int | None = None, *, norm_first: bool = True, norm: str = "layer",
        eps: float = 1e-5, activation: str = "gelu", bias: bool = True, init: str = "xavier_uniform", seed: int = 0,
        dtype: str = "float32", backend: str | None = None, device: str | None = None, **attention: Any,
    ) -> None:  # fmt: skip
        (self.d_model,) = checked_sizes(d_model=d_model)
        self.norm_first, self.norm = bool(norm_first), _norm.checked_norm("norm", norm)
        self.eps = checked_eps(eps)
        stream: Any = generator(seed)
        shared: dict[str, Any] = {
            "bias": bias, "init": init, "seed": stream, "dtype": dtype, "backend": backend, "device": device,
        }  # fmt: skip
        hidden = 4 * self.d_model if hidden is None else hidden
        self._attention = MultiHeadAttention(self.d_model, num_heads, **attention, **shared)
        self._feed_forward = FeedForward(self.d_model, hidden, activation=activation, **shared)
        norm_parameters = {"weight": np.ones(self.d_model)}
        if norm == "layer" and bias:
            norm_parameters["bias"] = np.zeros(self.d_model)
        norms = {f"{name}.{kind}": x for name in ("norm1", "norm2") for kind, x in norm_parameters.items()}
        super().__init__(norms, dtype, backend, device)
        self._parameters |= taken_over(attention=self._attention, feed_forward=self._feed_forward)

    def config(self) -> dict[str, Any]:
        """Return the arguments that make a layer of the same architecture."""
        own = {name: getattr(self, name) for name in ("norm_first", "norm", "eps")}
        return {**self._attention.config(), **self._feed_forward.config(), **own}

    def __call__(self, x: Array, **arguments: Any) -> Array:
        """Return the block's result for x (…, n, d_model), and keep nothing.

        Keyword arguments are those of a call of :class:`MultiHeadAttention`: causal, mask, bias, key_lengths, ….
        """
        return self._call(*self._sorted(x, arguments))

    def forward(self, x: Array, **arguments: Any) -> tuple[Array, Cache]:
        """Return ``(y, cache)``; arguments as when the layer is called."""
        return self._record(*self._sorted(x, arguments))

    def backward(
        self, dy: Array, cache: Cache, *, inputs: bool = True
    ) -> tuple[TransformerBlockInputs, dict[str, Array]]:
        """Return the gradients of x, bias and sinks, and by name those of the parameters, summed over the batch.

        ``inputs=False``, for the first layer of a model, leaves out that of x: it is None.
        """
        dinputs, grads = self._pull(dy, cache, TransformerBlockInputs._fields, inputs=inputs)
        return TransformerBlockInputs(*dinputs), {name: grads[name] for name in self._parameters}

    def decode(self, x: Array, cache: KeyValues, **arguments: Any) -> tuple[Array, KeyValues]:
        """Return the result for the next positions (B, n, d_model), and the cache with their keys and values.

        As :meth:`MultiHeadAttention.decode`; each block has a cache of its own.
        """
        arguments = self._attention._decoding(cache, self._place, arguments)
        trip = self._embark(self._of_width(x, self.d_model))
        native, following = self._place.backend, cache
        own, around = self._arguments(), Around(self.norm_first, self.norm, concrete(self.eps))
        (norm1_w, norm1_b, norm2_w, norm2_b), of_feed_forward = own[:4], own[4 + HEADS :]
        of_attention = {name: p for name, p in zip(_multi_head.PARAMETERS, own[4:], strict=False) if p is not None}
        plan = self._attention._plan()

        def attend(x: Array) -> tuple[Array, tuple[Any, ...]]:
            nonlocal following
            out, following = _decode.attend(native, x, of_attention, cache, plan, arguments)
            return out, ()

        def feed(h: Array) -> tuple[Array, tuple[Any, ...]]:
            return _feed_forward.forward(native, h, *of_feed_forward, activation=self._feed_forward.activation)

        with native.scope():
            h, _, _ = residual(native, trip.arrays[0], norm1_w, norm1_b, attend, around)  # (B, n, d_model)
            y, _, _ = residual(native, h, norm2_w, norm2_b, feed, around)  # (B, n, d_model)
        return trip.back(y, "TransformerBlock"), following

    def _sorted(self, x: Array, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Check the call, and return its arrays in the operation's order and its static settings."""
        inputs = self._of_width(x, self.d_model)
        expect_rank("x", x, 2)
        called, static = self._attention._sorted(x, None, None, arguments)
        inputs |= {name: array for name, array in called.items() if name not in ("query", "key", "value")}
        around = Around(self.norm_first, self.norm, concrete(self.eps))
        return inputs, {**static, "activation": self._feed_forward.activation, "around": around}


def taken_over(**parts: Layer) -> dict[str, Array]:
    """Return the parameters of parts by dotted names, and leave none to the parts: these only know what fits them."""
    parameters = {f"{part}.{name}": x for part, layer in parts.items() for name, x in layer.parameters().items()}
    for layer in parts.values():
        layer._parameters = {}
    return parameters
