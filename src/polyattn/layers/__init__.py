"""Layers: parameters over the operations of :mod:`polyattn.functional`, forward and backward, one a file."""

from __future__ import annotations

from ._layer import Layer
from ._layer_norm import LayerNorm, LayerNormInputs
from ._multi_head_attention import MultiHeadAttention
from ._projection import Projection, ProjectionInputs
from ._scaled_dot_product_attention import AttentionInputs, ScaledDotProductAttention

__all__ = [
    "AttentionInputs",
    "Layer",
    "LayerNorm",
    "LayerNormInputs",
    "MultiHeadAttention",
    "Projection",
    "ProjectionInputs",
    "ScaledDotProductAttention",
]
