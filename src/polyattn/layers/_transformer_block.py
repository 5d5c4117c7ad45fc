"""One block of a transformer: attention and a feed-forward layer, each with a norm and a residual connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..backend import Array, Backend, Cache
from ..functional._arguments import Arguments
from ..functional._checks import expect_rank
from ..functional._norms import checked_eps
from . import _feed_forward, _multi_head_attention
from ._feed_forward import FeedForward
from ._initial import checked_sizes, generator
from ._layer import Layer, named
from ._layer_norm import LayerNorm
from ._multi_head_arguments import checked_arguments, checked_decoding, checked_norm
from ._multi_head_attention import KeyValues, MultiHeadAttention
from ._rms_norm import RMSNorm

__all__ = ["TransformerBlock", "TransformerBlockInputs"]


class TransformerBlockInputs(NamedTuple):
    """The gradients of a :class:`TransformerBlock`'s inputs; None for inputs that were not given."""

    x: Array | None
    bias: Array | None
    sinks: Array | None


class Saved(NamedTuple):
    """What the backward needs."""

    norm1: Any
    attention: _multi_head_attention.Saved
    norm2: Any
    feed_forward: _feed_forward.Saved

    @property
    def kernel_name(self) -> str:
        """The name of the attention kernel."""
        return self.attention.kernel_name


class TransformerBlock(Layer):
    """Self-attention and a feed-forward layer, each with a norm and a residual connection.

    Parameters
    ----------
    d_model : int
        Width of the input and of the result.
    num_heads : int
        Number of query heads.
    hidden : int, optional
        Width between the projections of the feed-forward layer; default 4 · d_model.
    norm_first : bool
        True is pre-norm, x + f(norm(x)); False is post-norm, norm(x + f(x)), as in the original transformer.
    norm : {"layer", "rms"}
        LayerNorm, with a shift if ``bias`` is True, or RMSNorm.
    eps : float
        The epsilon of the norms.
    activation : {"gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"}
        As in :class:`FeedForward`.
    bias : bool
        Whether projections and layer norms have biases, initially zero.
    init : {"xavier_uniform", "normal"}
        Distribution of the weights, as in :class:`MultiHeadAttention`.
    seed : int
        The same seed gives the same parameters on every backend.
    dtype : str
    backend, device : str, optional
        Where the parameters are and the layer computes; the default is the selection in force, else NumPy.
    **attention
        Other options of :class:`MultiHeadAttention`: num_kv_heads, head_dim, value_dim, scale, rotary, qk_norm,
        qk_norm_eps, sinks and window.

    Raises
    ------
    ShapeError, DTypeError, ArgumentError, UnknownBackendError, BackendUnavailableError

    Notes
    -----
    Parameters: those of the child layers by dotted names, ``norm1.weight``, ``attention.q_proj.weight``, …,
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

    def __init__(
        self, d_model: int, num_heads: int, hidden: int | None = None, *, norm_first: bool = True, norm: str = "layer",
        eps: float = 1e-5, activation: str = "gelu", bias: bool = True, init: str = "xavier_uniform", seed: int = 0,
        dtype: str = "float32", backend: str | None = None, device: str | None = None, **attention: Any,
    ) -> None:  # fmt: skip
        (self.d_model,) = checked_sizes(d_model=d_model)
        self.norm_first, self.norm = bool(norm_first), checked_norm("norm", norm)
        self.eps = checked_eps(eps)
        shared: dict[str, Any] = {"dtype": dtype, "backend": backend, "device": device}
        parts: dict[str, Any] = {"bias": bias, "init": init, "seed": generator(seed), **shared}
        self.norm1, self.norm2 = (self._norm(bias, **shared) for _ in range(2))
        self.attention = MultiHeadAttention(self.d_model, num_heads, **attention, **parts)
        hidden = 4 * self.d_model if hidden is None else hidden
        self.feed_forward = FeedForward(self.d_model, hidden, activation=activation, **parts)
        super().__init__({}, **shared)

    def config(self) -> dict[str, Any]:
        """Return the arguments that create a layer of the same architecture."""
        own = {name: getattr(self, name) for name in ("norm_first", "norm", "eps")}
        return {**self.attention.config(), **self.feed_forward.config(), **own}

    def __call__(self, x: Array, **arguments: Any) -> Array:
        """Return the block's result for x (…, n, d_model), without a cache.

        Keyword arguments are those of a call of :class:`MultiHeadAttention`: causal, mask, bias, key_lengths, ….
        """
        arrays, options = self._checked(x, arguments)
        return self._call(arrays, **options)

    def forward(self, x: Array, **arguments: Any) -> tuple[Array, Cache]:
        """Return ``(y, cache)``; arguments as in a call of the layer."""
        arrays, options = self._checked(x, arguments)
        return self._call_with_cache(arrays, **options)

    def backward(
        self, dy: Array, cache: Cache, *, inputs: bool = True
    ) -> tuple[TransformerBlockInputs, dict[str, Array]]:
        """Return the gradients of x, bias and sinks, and those of the parameters by name, summed over the batch.

        With ``inputs=False``, for the first layer of a model, that of x is None and not computed.
        """
        return self._call_backward(dy, cache, inputs=inputs)

    def decode(self, x: Array, cache: KeyValues, **arguments: Any) -> tuple[Array, KeyValues]:
        """Return the result for the next positions (B, n, d_model), and the cache with their keys and values.

        As :meth:`MultiHeadAttention.decode`; each block needs its own cache.
        """
        arguments = checked_decoding(self.attention, cache, self._place, arguments)
        placed = self._placed(self._checked_input(x, self.d_model))
        native, following = self._place.backend, cache

        def attend(x: Array) -> tuple[Array, None]:
            nonlocal following
            out, following = self.attention.native_decode(native, x, cache, arguments)
            return out, None

        def feed(h: Array) -> tuple[Array, Any]:
            return self.feed_forward.native_forward(native, h)

        with native.scope():
            h, _, _ = self._residual(native, placed.arrays["x"], self.norm1, attend)  # (B, n, d_model)
            y, _, _ = self._residual(native, h, self.norm2, feed)  # (B, n, d_model)
        return placed.to_input_device(y, "TransformerBlock"), following

    # ---- forward and backward ------------------------------------------------------------------------------------

    def native_forward(self, backend: Backend, x: Array, **arguments: Any) -> tuple[Array, Saved]:
        """Apply attention, then the feed-forward layer, each with its residual connection; return ``(y, saved)``."""

        def attend(x: Array) -> tuple[Array, Any]:
            return self.attention.native_forward(backend, x, **arguments)

        def feed(h: Array) -> tuple[Array, Any]:
            return self.feed_forward.native_forward(backend, h)

        h, norm1, attention = self._residual(backend, x, self.norm1, attend)  # (…, n, d_model)
        y, norm2, feed_forward = self._residual(backend, h, self.norm2, feed)  # (…, n, d_model)
        return y, Saved(norm1, attention, norm2, feed_forward)

    def native_backward(
        self, backend: Backend, dy: Array, saved: Saved, *, inputs: bool = True
    ) -> tuple[TransformerBlockInputs, dict[str, Array]]:
        """Compute the gradients in reverse order; without ``inputs`` that of x is None."""

        def attend_backward(dout: Array) -> tuple[Any, dict[str, Array]]:
            wanted = inputs or self.norm_first  # the gradients of norm1's parameters need it
            return self.attention.native_backward(backend, dout, saved.attention, inputs=wanted)

        def feed_backward(dout: Array) -> tuple[Any, dict[str, Array]]:
            return self.feed_forward.native_backward(backend, dout, saved.feed_forward)

        dh, dnorm2, _, dfeed = self._residual_backward(backend, dy, self.norm2, saved.norm2, feed_backward)
        dx, dnorm1, dinputs, dattention = self._residual_backward(backend, dh, self.norm1, saved.norm1, attend_backward)
        grads = named(norm1=dnorm1, norm2=dnorm2, attention=dattention, feed_forward=dfeed)
        return TransformerBlockInputs(dx if inputs else None, dinputs.bias, dinputs.sinks), grads

    def _residual(
        self, backend: Backend, x: Array, norm: Layer, inner: Callable[[Array], tuple[Array, Any]]
    ) -> tuple[Array, Any, Any]:
        """Return x + inner(norm(x)) or norm(x + inner(x)), and the saved records of the norm and the inner layer."""
        if self.norm_first:
            normed, norm_saved = norm.native_forward(backend, x)
            out, saved = inner(normed)
            return x + out, norm_saved, saved
        out, saved = inner(x)
        y, norm_saved = norm.native_forward(backend, x + out)
        return y, norm_saved, saved

    def _residual_backward(
        self, backend: Backend, dy: Array, norm: Layer, norm_saved: Any,
        inner_backward: Callable[[Array], tuple[Any, dict[str, Array]]],
    ) -> tuple[Any, dict[str, Array], Any, dict[str, Array]]:  # fmt: skip
        """Return the gradients of x (None if the inner layer's is), of norm, inner inputs and inner parameters."""
        if self.norm_first:
            # y = x + out; out = inner(normed); normed = norm(x)
            dinputs, dinner = inner_backward(dy)
            (dx,), dnorm = norm.native_backward(backend, dinputs[0], norm_saved)
            return dy + dx, dnorm, dinputs, dinner
        # y = norm(total); total = x + out; out = inner(x)
        (dtotal,), dnorm = norm.native_backward(backend, dy, norm_saved)
        dinputs, dinner = inner_backward(dtotal)
        return None if dinputs[0] is None else dtotal + dinputs[0], dnorm, dinputs, dinner

    def _norm(self, bias: bool, **shared: Any) -> LayerNorm | RMSNorm:
        if self.norm == "rms":
            return RMSNorm(self.d_model, eps=self.eps, **shared)
        return LayerNorm(self.d_model, eps=self.eps, bias=bias, **shared)

    def _checked(self, x: Array, arguments: dict[str, Any]) -> Arguments:
        """Check the arguments of a call, and return its arrays and static arguments by name."""
        inputs = self._checked_input(x, self.d_model)
        expect_rank("x", x, 2)
        arrays, options = checked_arguments(self.attention, arguments, x)
        return Arguments({**inputs, **{name: a for name, a in arrays.items() if name != "query"}}, options)
