"""Operations as triples of pure functions: ``op``, ``op_forward`` and ``op_backward``.

``y = op(x)`` returns the result alone; ``y, cache = op_forward(x)`` also returns what the
backward needs; ``op_backward(dy, cache)`` returns a named tuple with a gradient for each
array argument, None for integers and absent arguments. Each operation has its own file,
with its forward and its backward.
"""

from __future__ import annotations

from ..kernels import AttentionGrads, RowStatistics
from ._alibi_bias import alibi_bias
from ._attention import attention, attention_backward, attention_forward
from ._attention_backward_vjp import AttentionBackwardGrads, attention_backward_vjp
from ._attention_jvp import attention_jvp
from ._attention_merge import attention_merge
from ._attention_weights import attention_weights
from ._block_mask import block_mask
from ._cross_entropy import CrossEntropyGrads, cross_entropy, cross_entropy_backward, cross_entropy_forward
from ._embedding import EmbeddingGrads, embedding, embedding_backward, embedding_forward
from ._explain import Explanation, explain
from ._geglu import GegluGrads, geglu, geglu_backward, geglu_forward
from ._gelu import GeluGrads, gelu, gelu_backward, gelu_forward
from ._layer_norm import LayerNormGrads, layer_norm, layer_norm_backward, layer_norm_forward
from ._linear import LinearGrads, linear, linear_backward, linear_forward
from ._log_softmax import LogSoftmaxGrads, log_softmax, log_softmax_backward, log_softmax_forward
from ._mse_loss import MSELossGrads, mse_loss, mse_loss_backward, mse_loss_forward
from ._prefix_mask import prefix_mask
from ._relative_position_bias import relative_position_bias
from ._relu import ReluGrads, relu, relu_backward, relu_forward
from ._rms_norm import RMSNormGrads, rms_norm, rms_norm_backward, rms_norm_forward
from ._rotary_embedding import (
    RotaryEmbeddingGrads,
    rotary_embedding,
    rotary_embedding_backward,
    rotary_embedding_forward,
)
from ._rotary_scaling import LinearScaling, Llama3Scaling, NTKScaling, RotaryScaling, YaRNScaling
from ._silu import SiluGrads, silu, silu_backward, silu_forward
from ._softmax import SoftmaxGrads, softmax, softmax_backward, softmax_forward
from ._swiglu import SwigluGrads, swiglu, swiglu_backward, swiglu_forward

__all__ = [
    "AttentionBackwardGrads",
    "AttentionGrads",
    "CrossEntropyGrads",
    "EmbeddingGrads",
    "Explanation",
    "GegluGrads",
    "GeluGrads",
    "LayerNormGrads",
    "LinearGrads",
    "LinearScaling",
    "Llama3Scaling",
    "LogSoftmaxGrads",
    "MSELossGrads",
    "NTKScaling",
    "RMSNormGrads",
    "ReluGrads",
    "RotaryEmbeddingGrads",
    "RotaryScaling",
    "RowStatistics",
    "SiluGrads",
    "SoftmaxGrads",
    "SwigluGrads",
    "YaRNScaling",
    "alibi_bias",
    "attention",
    "attention_backward",
    "attention_backward_vjp",
    "attention_forward",
    "attention_jvp",
    "attention_merge",
    "attention_weights",
    "block_mask",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "embedding",
    "embedding_backward",
    "embedding_forward",
    "explain",
    "geglu",
    "geglu_backward",
    "geglu_forward",
    "gelu",
    "gelu_backward",
    "gelu_forward",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "linear",
    "linear_backward",
    "linear_forward",
    "log_softmax",
    "log_softmax_backward",
    "log_softmax_forward",
    "mse_loss",
    "mse_loss_backward",
    "mse_loss_forward",
    "prefix_mask",
    "relative_position_bias",
    "relu",
    "relu_backward",
    "relu_forward",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rotary_embedding",
    "rotary_embedding_backward",
    "rotary_embedding_forward",
    "silu",
    "silu_backward",
    "silu_forward",
    "softmax",
    "softmax_backward",
    "softmax_forward",
    "swiglu",
    "swiglu_backward",
    "swiglu_forward",
]
