"""Operations as triples of pure functions: ``op``, ``op_forward`` and ``op_backward``.

``y = op(x)`` keeps nothing; ``y, cache = op_forward(x)`` keeps what the backward
needs; ``op_backward(dy, cache)`` is a named tuple with a gradient for each
argument, None for integers and for what was not given. One operation a file,
its forward and its backward beside each other.
"""

from __future__ import annotations

from ._attention import AttentionGrads, attention, attention_backward, attention_forward
from ._attention_merge import attention_merge
from ._attention_weights import attention_weights
from ._cross_entropy import CrossEntropyGrads, cross_entropy, cross_entropy_backward, cross_entropy_forward
from ._explain import Explanation, explain
from ._gelu import GeluGrads, gelu, gelu_backward, gelu_forward
from ._layer_norm import LayerNormGrads, layer_norm, layer_norm_backward, layer_norm_forward
from ._linear import LinearGrads, linear, linear_backward, linear_forward
from ._mse_loss import MSELossGrads, mse_loss, mse_loss_backward, mse_loss_forward
from ._relu import ReluGrads, relu, relu_backward, relu_forward
from ._softmax import SoftmaxGrads, softmax, softmax_backward, softmax_forward

__all__ = [
    "AttentionGrads",
    "CrossEntropyGrads",
    "Explanation",
    "GeluGrads",
    "LayerNormGrads",
    "LinearGrads",
    "MSELossGrads",
    "ReluGrads",
    "SoftmaxGrads",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_merge",
    "attention_weights",
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "explain",
    "gelu",
    "gelu_backward",
    "gelu_forward",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "linear",
    "linear_backward",
    "linear_forward",
    "mse_loss",
    "mse_loss_backward",
    "mse_loss_forward",
    "relu",
    "relu_backward",
    "relu_forward",
    "softmax",
    "softmax_backward",
    "softmax_forward",
]
