"""Layers: parameters and the operations of :mod:`polyattn.functional`, with forward and backward."""

from __future__ import annotations

from ._embedding import Embedding, EmbeddingInputs
from ._feed_forward import FeedForward, FeedForwardInputs
from ._layer import Layer
from ._layer_norm import LayerNorm, LayerNormInputs
from ._multi_head_attention import MultiHeadAttention
from ._projection import Projection, ProjectionInputs
from ._rms_norm import RMSNorm, RMSNormInputs
from ._scaled_dot_product_attention import AttentionInputs, ScaledDotProductAttention
from ._transformer_block import TransformerBlock, TransformerBlockInputs

__all__ = [
    "AttentionInputs",
    "Embedding",
    "EmbeddingInputs",
    "FeedForward",
    "FeedForwardInputs",
    "Layer",
    "LayerNorm",
    "LayerNormInputs",
    "MultiHeadAttention",
    "Projection",
    "ProjectionInputs",
    "RMSNorm",
    "RMSNormInputs",
    "ScaledDotProductAttention",
    "TransformerBlock",
    "TransformerBlockInputs",
]
