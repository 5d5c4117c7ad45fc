"""What is right: plain float64 NumPy formulas, written without the library.

Every function takes anything that NumPy can read and computes in float64. They
are slow and short on purpose; nothing here is imported by the library proper.
The tests of the library check these formulas too, against central differences
and against torch.
"""

from ._attention import AttentionAnswer, AttentionSlopes, allowed_pairs, attention, attention_gradients, merge
from ._dropout import keep_mask, threefry2x32
from ._functional import (
    cross_entropy,
    cross_entropy_gradient,
    cross_entropy_weight_gradient,
    gelu,
    gelu_gradient,
    layer_norm,
    layer_norm_gradients,
    linear,
    linear_gradients,
    mse_loss,
    mse_loss_gradients,
    relu,
    relu_gradient,
    softmax,
    softmax_gradient,
)
from ._layers import multi_head_attention, multi_head_attention_gradients
from ._optim import adamw, sgd

__all__ = [
    "AttentionAnswer",
    "AttentionSlopes",
    "adamw",
    "allowed_pairs",
    "attention",
    "attention_gradients",
    "cross_entropy",
    "cross_entropy_gradient",
    "cross_entropy_weight_gradient",
    "gelu",
    "gelu_gradient",
    "keep_mask",
    "layer_norm",
    "layer_norm_gradients",
    "linear",
    "linear_gradients",
    "merge",
    "mse_loss",
    "mse_loss_gradients",
    "multi_head_attention",
    "multi_head_attention_gradients",
    "relu",
    "relu_gradient",
    "sgd",
    "softmax",
    "softmax_gradient",
    "threefry2x32",
]
