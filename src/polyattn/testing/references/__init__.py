"""References: plain float64 NumPy formulas, independent of the library.

Every function takes array_likes and computes in float64. The formulas are slow and
short on purpose, and the library does not import them. The tests of the library
check them too, against central differences and torch.
"""

from ._activations import (
    geglu,
    geglu_gradients,
    gelu,
    gelu_gradient,
    relu,
    relu_gradient,
    silu,
    silu_gradient,
    swiglu,
    swiglu_gradients,
)
from ._attention import AttentionAnswer, AttentionSlopes, allowed_pairs, attention, attention_gradients, merge
from ._dropout import keep_mask, threefry2x32
from ._functional import (
    cross_entropy,
    cross_entropy_gradient,
    cross_entropy_weight_gradient,
    embedding,
    embedding_gradient,
    linear,
    linear_gradients,
    log_softmax,
    log_softmax_gradient,
    mse_loss,
    mse_loss_gradients,
    softmax,
    softmax_gradient,
)
from ._layers import multi_head_attention, multi_head_attention_gradients
from ._norms import layer_norm, layer_norm_gradients, rms_norm, rms_norm_gradients
from ._optim import adamw, sgd
from ._rotary import rotary_embedding, rotary_embedding_gradient, rotary_frequencies
from ._transformer import transformer_attention, transformer_block

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
    "embedding",
    "embedding_gradient",
    "geglu",
    "geglu_gradients",
    "gelu",
    "gelu_gradient",
    "keep_mask",
    "layer_norm",
    "layer_norm_gradients",
    "linear",
    "linear_gradients",
    "log_softmax",
    "log_softmax_gradient",
    "merge",
    "mse_loss",
    "mse_loss_gradients",
    "multi_head_attention",
    "multi_head_attention_gradients",
    "relu",
    "relu_gradient",
    "rms_norm",
    "rms_norm_gradients",
    "rotary_embedding",
    "rotary_embedding_gradient",
    "rotary_frequencies",
    "sgd",
    "silu",
    "silu_gradient",
    "softmax",
    "softmax_gradient",
    "swiglu",
    "swiglu_gradients",
    "threefry2x32",
    "transformer_attention",
    "transformer_block",
]
