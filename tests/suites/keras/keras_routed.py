"""Keras's attention routed through polyattn on Keras's own backend: a pytest plugin for its own tests.

Three ways lead to attention: the backend's ``dot_product_attention``; what
MultiHeadAttention and GroupedQueryAttention compute where they also return the
weights, or have other axes than one; and the layers Attention and
AdditiveAttention. Two things stay Keras's: a kernel that is asked for by
``flash_attention=True``, and dropout while training, whose bits are its own.
"""

import contextlib

import numpy as np
from keras.src import backend, ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.layers import Attention, GroupedQueryAttention, MultiHeadAttention
from routing import fused, route, with_weights


def has_values():
    """Say whether the inputs have values, and are not only symbolic."""
    return not in_symbolic_scope()


def without_fused_kernels(function):
    """Call torch's attention as the formula: its fused backward makes weights n_k times too large in rows whose scores
    are all large, since it keeps the rounded log-sum-exp.
    """

    def reference(query, key, value, bias=None, mask=None, scale=None, is_causal=False, **others):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # The formula takes neither a mask nor a bias beside is_causal.
        given = mask is not None or bias is not None
        with contextlib.nullcontext() if is_causal and given else sdpa_kernel(SDPBackend.MATH):
            return function(query, key, value, bias, mask, scale, is_causal, **others)

    return reference if backend.backend() == "torch" else function


@route(
    backend.nn, "dot_product_attention", comparable=has_values, differentiated=3,
    reference=without_fused_kernels(backend.nn.dot_product_attention),
)  # fmt: skip
def dot_product_attention(
    query, key, value, bias=None, mask=None, scale=None, is_causal=False, flash_attention=None,
    attn_logits_soft_cap=None,
):  # fmt: skip
    if flash_attention or attn_logits_soft_cap is not None:
        return NotImplemented
    query, key, value = map(backend.convert_to_tensor, (query, key, value))
    dtype = backend.result_type(query.dtype, key.dtype, value.dtype)
    query, key, value = (backend.cast(x, dtype) for x in (query, key, value))
    bias = None if bias is None else backend.convert_to_tensor(bias, dtype=dtype)
    mask = None if mask is None else backend.convert_to_tensor(mask, dtype="bool")
    # On torch alone Keras adds the number that excludes to the scores, rather than to put it in their place.
    added = backend.nn._get_large_negative(dtype) if backend.backend() == "torch" else None
    return fused(query, key, value, bias, mask, causal=is_causal, scale=scale, added=added)


@route(MultiHeadAttention, "_compute_attention", comparable=has_values)
def multi_head_attention(
    self, query, key, value, attention_mask=None, training=None, return_attention_scores=False, use_causal_mask=False
):
    explicit = self._dropout > 0 or return_attention_scores or len(query.shape) != 4
    if not explicit or self._flash_attention or (training and self._dropout > 0):
        return NotImplemented
    mask = with_causal(self, query, value, attention_mask, use_causal_mask)
    return over_axes(self._attention_axes, query, key, value, mask, self._inverse_sqrt_key_dim)


@route(GroupedQueryAttention, "_compute_attention", comparable=has_values)
def grouped_query_attention(self, query, key, value, attention_mask=None, training=None, use_causal_mask=False):
    explicit = self.dropout > 0 or self._return_attention_scores
    if not explicit or self._flash_attention or (training and self.dropout > 0):
        return NotImplemented
    mask = with_causal(self, query, value, attention_mask, use_causal_mask)
    return over_axes((1,), query, key, value, mask, self._inverse_sqrt_head_dim)


def with_causal(layer, query, value, mask, use_causal_mask):
    """Add the causal mask, which these layers define over their second axis."""
    mask = None if mask is None else ops.cast(ops.convert_to_tensor(mask), "bool")
    if not use_causal_mask:
        return mask
    causal = layer._compute_causal_mask(query, value)
    return causal if mask is None else ops.logical_and(mask, causal)


def over_axes(axes, query, key, value, mask, scale):
    """Attend over several axes of (batch, …, heads, features), merged into one."""
    lead = len(query.shape) - 1 - len(axes)
    order = [axis for axis in range(len(query.shape) - 1) if axis not in axes] + [*axes, len(query.shape) - 1]
    tensors = [ops.transpose(ops.convert_to_tensor(x), order) for x in (query, key, value)]  # (…, heads, *axes, d)
    batch, lengths, others = tensors[0].shape[:lead], tensors[0].shape[lead:-1], tensors[1].shape[lead:-1]
    if mask is not None:
        while len(mask.shape) < lead + 2 * len(axes):
            mask = ops.expand_dims(mask, -2 * len(axes) - 1)
        mask = ops.broadcast_to(mask, (*mask.shape[:lead], *lengths, *others))
        mask = ops.reshape(mask, (*mask.shape[:lead], int(np.prod(lengths)), int(np.prod(others))))
    flat = (ops.reshape(x, (*x.shape[:lead], int(np.prod(x.shape[lead:-1])), x.shape[-1])) for x in tensors)
    out, weights = with_weights(*flat, mask=mask, scale=scale)
    out = ops.transpose(ops.reshape(out, (*batch, *lengths, out.shape[-1])), np.argsort(order).tolist())
    return out, ops.reshape(weights, (*batch, *lengths, *others))


@route(Attention, "call", comparable=has_values)
def attention(self, inputs, mask=None, training=False, return_attention_scores=False, use_causal_mask=False):
    of_products = self.score_mode == "dot" and type(self)._calculate_scores is Attention._calculate_scores
    if not of_products or (training and self.dropout > 0):
        return NotImplemented
    self._validate_inputs(inputs=inputs, mask=mask)
    query, value, key = inputs[0], inputs[1], inputs[-1]
    query_mask, value_mask = mask[:2] if mask else (None, None)
    if self.scale is not None:
        query = ops.multiply(query, self.scale)
    out, weights = with_weights(query, key, value, mask=row(value_mask), causal=use_causal_mask, q_offset=0, scale=1.0)
    if query_mask is not None:
        out = ops.where(ops.expand_dims(query_mask, -1), out, 0)
    return (out, weights) if return_attention_scores else out


@route(Attention, "_apply_scores", comparable=has_values)
def attention_of_scores(self, scores, value, scores_mask=None, training=False):
    """AdditiveAttention's scores, and Attention's of mode "concat", are a bias where all products are zero."""
    if training and self.dropout > 0:
        return NotImplemented
    query, key = ops.zeros_like(scores[..., :1]), ops.zeros_like(ops.swapaxes(scores[..., :1, :], -1, -2))
    return with_weights(query, key, value, bias=scores, mask=row(scores_mask))


def row(mask):
    """Return a mask of booleans; one of (batch, keys) holds for every query."""
    if mask is None:
        return None
    mask = ops.cast(ops.convert_to_tensor(mask), "bool")
    return ops.expand_dims(mask, -2) if len(mask.shape) == 2 else mask
