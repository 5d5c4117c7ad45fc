"""ONNX models on any backend: operators for ``onnx.reference.ReferenceEvaluator(new_ops=...)``.

The evaluator passes NumPy arrays and expects NumPy arrays; the selected backend
computes. Attention as in opset 23 to 25, LayerNormalization, RMSNormalization,
RotaryEmbedding, Softmax, LogSoftmax and Gelu.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..errors import ArgumentError, BackendUnavailableError, DTypeError, ShapeError
from ..functional import (
    attention,
    attention_forward,
    attention_weights,
    gelu,
    layer_norm,
    log_softmax,
    rms_norm,
    rotary_embedding,
    softmax,
)
from ..selection import get_backend, use_backend

__all__ = ["operators"]

Host = NDArray[Any]
DOUBLE = 11  # onnx.TensorProto.DOUBLE


def operators(backend: str | None = None, device: str | None = None) -> list[type]:
    """Return operator implementations for ``onnx.reference.ReferenceEvaluator(model, new_ops=...)``.

    Parameters
    ----------
    backend : str, optional
        The backend that computes; by default the one selected when the model runs, else NumPy.
    device : str, optional
        A device of that backend.

    Returns
    -------
    list of classes
        Subclasses of ``onnx.reference.op_run.OpRun``. The evaluator computes all other operators of a model.
        Scores, softmax and norms are computed in float32 at least, even if ``softmax_precision`` or ``stash_type``
        allows less. float16 and bfloat16 are computed in float32 if the backend lacks the dtype.

    Raises
    ------
    BackendUnavailableError, UnknownBackendError
        If onnx is not installed, or the backend or device cannot be used.

    Notes
    -----
    https://onnx.ai/onnx/operators/onnx__Attention.html. The output of a query that may attend to no key is zeros,
    and the values at excluded keys, NaN for instance, do not affect any result. ``qk_matmul_output`` in the modes 0
    to 2 is computed as the log-sum-exp over one key at a time. The statistics of LayerNormalization are computed by
    NumPy, if the model uses them.

    Examples
    --------
    >>> from onnx import parser
    >>> from onnx.reference import ReferenceEvaluator
    >>> from polyattn.interop.onnx import operators
    >>> model = parser.parse_model('''
    ...     <ir_version: 10, opset_import: ["": 23]>
    ...     one_head (float[1,1,n,2] q, float[1,1,m,2] k, float[1,1,m,1] v) => (float[1,1,n,1] y)
    ...     { y = Attention(q, k, v) }''')
    >>> run = ReferenceEvaluator(model, new_ops=operators("numpy")).run
    >>> q, k = (np.zeros((1, 1, n, 2), dtype="float32") for n in (1, 2))
    >>> run(None, {"q": q, "k": k, "v": np.array([[[[1], [3]]]], dtype="float32")})[0]
    array([[[[2.]]]], dtype=float32)
    """
    try:
        from onnx.reference.op_run import OpRun
    except ImportError as cause:
        raise BackendUnavailableError(
            f'onnx is needed; install it with: pip install "polyattn[onnx]" ({cause})'
        ) from cause
    if backend is None and device is not None:
        raise ArgumentError(f"device: expected a backend as well, got {device!r} alone")

    def scope() -> Any:
        return nullcontext() if backend is None else use_backend(backend, device)

    def operator(name: str, compute: Callable[..., tuple[Host | None, ...]]) -> type:
        def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[Host | None, ...]:
            arrays = (None if x is None else np.asarray(x) for x in inputs)
            with scope():
                return compute(self, *arrays, **attributes)[: len(self.onnx_node.output)]

        return type(name, (OpRun,), {"op_domain": "", "_run": run, "__doc__": compute.__doc__})

    with scope():  # an unknown backend or device raises here, not at the first node
        return [operator(name, compute) for name, compute in OPERATORS.items()]


class _Problem(NamedTuple):
    """Attention's arguments as polyattn takes them, (B, H, n, d)."""

    q: Host
    k: Host
    v: Host
    shaping: dict[str, Any]  # scale, softcap
    excluding: dict[str, Any]  # all other arguments except the bias
    bias: Host | None


def attention_node(
    node: Any, q: Host, k: Host, v: Host, attn_mask: Host | None = None, past_key: Host | None = None,
    past_value: Host | None = None, nonpad_kv_seqlen: Host | None = None, *, q_num_heads: int | None = None,
    kv_num_heads: int | None = None, qk_matmul_output_mode: int = 0, softmax_precision: int | None = None,
    **attributes: Any,
) -> tuple[Host | None, ...]:  # fmt: skip
    """Attention-23 to -25."""
    packed, dtype = q.ndim == 3, q.dtype
    if packed:
        q, k, v = _split(q, q_num_heads), _split(k, kv_num_heads), _split(v, kv_num_heads)
    if (past_key is None) != (past_value is None) or (past_key is not None and nonpad_kv_seqlen is not None):
        raise ArgumentError("past_key, past_value: expected both or none, and none beside nonpad_kv_seqlen")
    past = 0 if past_key is None else past_key.shape[2]
    if past_key is not None and past_value is not None:
        k, v = np.concatenate([past_key, k], axis=2), np.concatenate([past_value, v], axis=2)
    present = k, v
    q, k, v = _together(q, k, v)
    if softmax_precision == DOUBLE:
        q, k, v = (x.astype(np.float64) for x in (q, k, v))
    offset: Any = past
    if nonpad_kv_seqlen is not None:
        nonpad_kv_seqlen = nonpad_kv_seqlen.reshape(-1).astype(np.int32)  # (B,); not every library has int64
        offset = nonpad_kv_seqlen - np.int32(q.shape[2])
    problem = _problem(q, k, v, attn_mask, offset, nonpad_kv_seqlen, **attributes)
    out = attention(q, k, v, bias=problem.bias, **problem.shaping, **problem.excluding)
    y = np.swapaxes(out, 1, 2).reshape(*out.shape[:1], out.shape[2], -1) if packed else out
    scores = _scores(problem, qk_matmul_output_mode).astype(dtype) if len(node.onnx_node.output) > 3 else None
    return y.astype(dtype), *present, scores


def _problem(
    q: Host, k: Host, v: Host, attn_mask: Host | None, offset: int | Host, lengths: Host | None, *, is_causal: int = 0,
    scale: float | None = None, softcap: float | None = None, left_window_size: int = -1, right_window_size: int = -1,
) -> _Problem:  # fmt: skip
    """Return polyattn's arguments for the node's attributes and mask."""
    mask = bias = None
    if attn_mask is not None:
        boolean = attn_mask.dtype == np.bool_
        # The last axis may be shorter than the number of keys: the remaining keys are excluded.
        missing = max(k.shape[2] - attn_mask.shape[-1], 0) if attn_mask.ndim else 0
        if not boolean:
            attn_mask = attn_mask.astype(q.dtype)
        full = np.pad(attn_mask, [(0, 0)] * (attn_mask.ndim - 1) + [(0, missing)] * bool(attn_mask.ndim),
                      constant_values=False if boolean else -math.inf)  # fmt: skip
        mask, bias = (full, None) if boolean else (None, full)
    window = tuple(None if side < 0 else side for side in (left_window_size, right_window_size))
    return _Problem(
        q, k, v, {"scale": scale, "softcap": softcap or None},
        {"mask": mask, "causal": bool(is_causal), "q_offset": offset, "window": window, "key_lengths": lengths}, bias,
    )  # fmt: skip


def _scores(problem: _Problem, mode: int) -> Host:
    """Return ``qk_matmul_output``: raw scores (0), capped (1), with bias and exclusion (2), weights (3)."""
    q, k, _, shaping, excluding, bias = problem
    if mode == 3:
        return np.asarray(attention_weights(q, k, bias=bias, **shaping, **excluding))
    if mode == 2:
        # With equal scores a weight is positive exactly where the pair is not excluded.
        level = None if bias is None else np.where(np.isneginf(bias), bias, np.zeros_like(bias))
        even = attention_weights(0 * np.ones_like(q), 0 * np.ones_like(k), bias=level, **excluding)
        scores = _each_key_alone(q, k, bias, **shaping)
        return np.where(even > 0, scores, -math.inf)
    if mode not in (0, 1):
        raise ArgumentError(f"qk_matmul_output_mode: expected 0, 1, 2 or 3, got {mode}")
    return _each_key_alone(q, k, None, **(shaping if mode == 1 else {**shaping, "softcap": None}))


def _each_key_alone(q: Host, k: Host, bias: Host | None, **shaping: Any) -> Host:
    """Return the scores: each key is a batch entry of its own, and the log-sum-exp over one key is its score."""
    keys = np.moveaxis(k, 2, 0)[..., None, :]  # (n_k, B, H_kv, 1, d)
    if bias is not None:
        bias = np.broadcast_to(bias, (*q.shape[:3], k.shape[2]))
        bias = np.moveaxis(bias, 3, 0)[..., None]  # (n_k, B, H, n_q, 1)
    _, cache = attention_forward(q, keys, keys, bias=bias, **shaping)
    return np.moveaxis(cache.lse, 0, 3)  # (B, H, n_q, n_k)


def layer_normalization_node(
    node: Any, x: Host, scale: Host, bias: Host | None = None, *, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> tuple[Host | None, ...]:
    """LayerNormalization-17."""
    axes = -axis if axis < 0 else x.ndim - axis
    wide, *parameters = _together(x, *_features(x, axes, scale, bias))
    y = layer_norm(wide, *parameters, eps=epsilon, axes=axes).astype(x.dtype)
    if len(node.onnx_node.output) < 2:
        return (y,)
    wide, over = x.astype(np.result_type(x.dtype, np.float32)), tuple(range(x.ndim - axes, x.ndim))
    mean, rstd = wide.mean(over, keepdims=True), 1 / np.sqrt(wide.var(over, keepdims=True) + epsilon)
    return y, mean.astype(x.dtype), rstd.astype(x.dtype)


def rms_normalization_node(
    node: Any, x: Host, scale: Host, *, axis: int = -1, epsilon: float = 1e-5, **_: Any
) -> tuple[Host, ...]:
    """RMSNormalization-23."""
    axes = -axis if axis < 0 else x.ndim - axis
    wide, weight = _together(x, *_features(x, axes, scale))
    return (rms_norm(wide, weight, eps=epsilon, axes=axes).astype(x.dtype),)


def rotary_embedding_node(
    node: Any, x: Host, cos_cache: Host, sin_cache: Host, position_ids: Host | None = None, *, interleaved: int = 0,
    num_heads: int | None = None, rotary_embedding_dim: int = 0,
) -> tuple[Host, ...]:  # fmt: skip
    """RotaryEmbedding-23."""
    packed = x.ndim == 3
    heads, cos, sin = _together(_split(x, num_heads, "X", "num_heads") if packed else x, cos_cache, sin_cache)
    ids = None if position_ids is None else position_ids.astype(np.int32)  # not every library has int64
    y = rotary_embedding(
        heads,
        tables=(cos, sin),
        positions=ids,
        interleaved=bool(interleaved),
        dim=rotary_embedding_dim or heads.shape[-1],
    )
    return ((np.swapaxes(y, 1, 2).reshape(x.shape) if packed else y).astype(x.dtype),)


def softmax_node(node: Any, x: Host, *, axis: int = -1) -> tuple[Host, ...]:
    """Softmax of every opset."""
    return (_along(softmax, node, x, axis),)


def log_softmax_node(node: Any, x: Host, *, axis: int = -1) -> tuple[Host, ...]:
    """LogSoftmax of every opset."""
    return (_along(log_softmax, node, x, axis),)


def gelu_node(node: Any, x: Host, *, approximate: str = "none") -> tuple[Host, ...]:
    """Gelu-20."""
    (wide,) = _together(x)
    return (gelu(wide, approximate=approximate).astype(x.dtype),)


OPERATORS: dict[str, Callable[..., tuple[Host | None, ...]]] = {
    "Attention": attention_node,
    "Gelu": gelu_node,
    "LayerNormalization": layer_normalization_node,
    "LogSoftmax": log_softmax_node,
    "RMSNormalization": rms_normalization_node,
    "RotaryEmbedding": rotary_embedding_node,
    "Softmax": softmax_node,
}


def _along(operation: Callable[..., Host], node: Any, x: Host, axis: int) -> Host:
    """Return a softmax along an axis; before opset 13, over all axes from that one on, by default the second."""
    (wide,) = _together(x)
    if node.run_params["opsets"][node.onnx_node.domain] >= 13:
        return operation(wide, axis=axis).astype(x.dtype)
    axis = axis if any(attribute.name == "axis" for attribute in node.onnx_node.attribute) else 1
    rows = wide.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    return operation(rows).reshape(x.shape).astype(x.dtype)


def _split(x: Host, heads: int | None, names: str = "Q, K, V", counts: str = "q_num_heads, kv_num_heads") -> Host:
    """Return (B, n, H · d) as (B, H, n, d)."""
    if not heads or x.ndim != 3 or x.shape[2] % heads:
        raise ShapeError(f"{names}: expected (batch, length, heads · size) and {counts}, got {x.shape} and {heads}")
    return np.swapaxes(x.reshape(*x.shape[:2], heads, x.shape[2] // heads), 1, 2)


def _features(x: Host, axes: int, *parameters: Host | None) -> tuple[Host | None, ...]:
    """Return the parameters of a norm in the shape of the axes that are normalised."""
    shape = x.shape[x.ndim - axes :]
    try:
        return tuple(None if p is None else np.broadcast_to(p, shape) for p in parameters)
    except ValueError:
        got = ", ".join(str(p.shape) for p in parameters if p is not None)
        raise ShapeError(f"Scale, B: expected a shape that broadcasts to {shape}, got {got}") from None


def _together(*arrays: Any) -> tuple[Any, ...]:
    """Return the arrays in one dtype: the widest of theirs, or float32 where the backend has none so narrow."""
    dtype = np.result_type(*(x for x in arrays if x is not None))
    selection = get_backend()
    if dtype.name in ("float16", "bfloat16") and selection is not None:
        try:
            registry.ready(selection.backend).dtype(dtype.name)
        except DTypeError:
            dtype = np.dtype(np.float32)
    return tuple(None if x is None else x.astype(dtype, copy=False) for x in arrays)
