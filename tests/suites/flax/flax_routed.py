"""Flax's attention routed through polyattn: a pytest plugin for Flax's own tests.

Flax calls ``jax.nn.dot_product_attention``; where the weights are wanted too it
computes those, and multiplies by the values. What it drops while training stays
its own, and so do JAX's words for heads that do not fit.
"""

import jax
from flax import nnx
from flax.nnx.nn import attention
from routing import call, fused, means_for_empty_rows, route, swap

import polyattn as pa

FLAX_WEIGHTS = attention.dot_product_attention_weights


@route(jax.nn, "dot_product_attention", differentiated=3)
def dot_product_attention(query, key, value, bias=None, mask=None, *, scale=None, is_causal=False):
    if query.shape[-2] % key.shape[-2]:
        return NotImplemented
    return fused(query, key, value, bias, mask, causal=is_causal, scale=scale)


def without_module(*arguments):
    """Call without the module, which would record the weights a second time."""
    return FLAX_WEIGHTS(*arguments[:10], None, *arguments[11:])


@route(attention, "dot_product_attention_weights", reference=without_module)
def dot_product_attention_weights(
    query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision, module,
    promote_dtype, is_causal,
):  # fmt: skip
    if dropout_rate > 0 and not deterministic:
        return NotImplemented
    q, k = map(swap, promote_dtype((query, key), dtype=dtype))
    mask = None if mask is None else mask.astype(bool)
    q, bias, mask, causal = means_for_empty_rows(q, bias, mask, is_causal, k.shape[-2])
    weights = call(pa.attention_weights, q, k, mask=mask, bias=bias, causal=causal, q_offset=0)
    if module:
        module.sow(nnx.Intermediate, "attention_weights", weights)
    return weights
