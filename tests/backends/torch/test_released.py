"""The arrays of a differentiated call are released with the last name that a program has for them."""

import torch

import polyattn as pa
from polyattn.interop.torch import to_module


def test_nothing_waits_for_the_garbage_collector(outlive):
    def differentiated():
        x = torch.ones(2, 5, 4, requires_grad=True)
        out = pa.attention(x, x, x)
        (dx,) = torch.autograd.grad(pa.functional.layer_norm(out).sum(), x)
        return [x, out, dx]

    assert outlive(differentiated) == []


def test_a_module_that_is_not_differentiated(outlive):
    def discarded():
        layer = to_module(pa.MultiHeadAttention(8, 2, seed=0, backend="torch"))
        x = torch.ones(2, 5, 8)
        return [x, layer(x), *layer.parameters()]

    assert outlive(discarded) == []
