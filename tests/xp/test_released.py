"""Arrays are released with the last name that a program has for them, not when the garbage collector runs."""

import numpy as np
import pytest

import polyattn as pa

F = pa.functional


def attention(make, backend):
    q, k, v, bias = (make(x) for x in np.random.default_rng(0).normal(size=(4, 2, 5, 5)))
    out, cache = pa.attention_forward(q, k, v, bias=bias, causal=True)
    return [q, k, v, bias, out, *pa.attention_backward(out, cache)[:4]]


def rows(make, backend):
    x, weight, bias = make(np.ones((3, 4))), make(np.ones(4)), make(np.zeros(4))
    y, cache = F.layer_norm_forward(x, weight, bias)
    return [x, y, *F.layer_norm_backward(y, cache), F.softmax(x), F.rotary_embedding(x)]


def layer(make, backend):
    x = make(np.ones((2, 5, 8)))
    block = pa.TransformerBlock(8, 2, seed=0, dtype="float64", backend=backend)
    y, cache = block.forward(x)
    dx, grads = block.backward(y, cache)
    return [x, y, dx.x, *grads.values()]


def decoding(make, backend):
    step = make(np.ones((1, 2, 1, 4)))
    cache = pa.KVCache.create(1, 2, 8, 4, dtype="float64", backend=backend).append(step, step)
    return [step, cache.attention(step)]


@pytest.mark.parametrize("function", [attention, rows, layer, decoding])
def test_nothing_waits_for_the_garbage_collector(backend, make, outlive, function):
    assert outlive(lambda: function(make, backend)) == []
