"""Conversion between other libraries' weights and polyattn's parameters: names and shapes change, values do not.

Plain functions on dicts of arrays of any library; the other libraries are not imported. Each takes the layers of the
parameters: one, or a dict of several by their names in the whole model. One error lists all names that are missing or
unexpected, and all arrays of another shape. Results may share memory with the arguments.

======================================================  =========================================================
:func:`from_torch`, :func:`to_torch`                    ``nn.Linear``, ``nn.LayerNorm``, ``nn.RMSNorm``,
                                                        ``nn.Embedding``, ``nn.MultiheadAttention``,
                                                        ``nn.TransformerEncoderLayer``
:func:`from_keras`, :func:`to_keras`                    ``MultiHeadAttention``, ``GroupQueryAttention``
:func:`from_flax`, :func:`to_flax`                      ``nnx.MultiHeadAttention``, Linen's of the same name
:func:`from_hugging_face`, :func:`to_hugging_face`      BERT, GPT-2 and Llama, in layers that
                                                        :func:`hugging_face_layers` makes
======================================================  =========================================================
"""

from ._hugging_face import from_hugging_face, to_hugging_face
from ._hugging_face_layers import hugging_face_layers
from ._keras_flax import from_flax, from_keras, to_flax, to_keras
from ._layers import load, parameters_of
from ._torch import from_torch, to_torch

__all__ = [
    "from_flax",
    "from_hugging_face",
    "from_keras",
    "from_torch",
    "hugging_face_layers",
    "load",
    "parameters_of",
    "to_flax",
    "to_hugging_face",
    "to_keras",
    "to_torch",
]
