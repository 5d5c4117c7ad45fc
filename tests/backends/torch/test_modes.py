"""Attention where torch does more than compute: vmap, autocast and grad of grad."""

import numpy as np
import pytest
import torch

import polyattn as pa
from polyattn import functional as F
from polyattn import registry
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(59)
Q, K, V = (RNG.standard_normal((2, 3, 5, 4)) for _ in range(3))


def tensors():
    return [torch.tensor(x) for x in (Q, K, V)]


def test_vmap_over_masks():
    """Whether a mask has something to isolate is another question for each item."""
    mask = RNG.random((2, 5, 5)) < 0.7
    mask[:, 2] = False
    k = K.copy()
    k[1, 0, 3] = np.nan
    mask[1, :, 3] = False
    q, _, v = tensors()
    out = torch.func.vmap(lambda q, k, v, m: pa.attention(q, k, v, mask=m))(q, torch.tensor(k), v, torch.tensor(mask))
    assert_close(out.numpy(), ref.attention(Q, k, V, mask=mask[:, None]).out)


def test_vmap_of_gradients():
    def loss(q, k, v):
        return pa.attention(q, k, v, causal=True).sum()

    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*tensors())
    want = ref.attention_gradients(np.ones(Q.shape), Q, K, V, causal=True)
    for got, expected in zip(each, want[:3], strict=True):
        assert_close(got.numpy(), expected)


def test_autocast_lowers_nothing():
    """Scores, softmax and sums stay in float32 at least, and results in the dtype of the inputs."""
    q, k, v = (x.float() for x in tensors())
    layer = pa.MultiHeadAttention(4, 2, backend="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, cache = pa.attention_forward(q, k, v, causal=True)
        grads = pa.attention_backward(torch.ones_like(out), cache)
        leaf = q.clone().requires_grad_()
        pa.attention(leaf, k, v, causal=True).sum().backward()
        y = layer(q)
    assert out.dtype == cache.lse.dtype == y.dtype == torch.float32
    held = [x.double().numpy() for x in (q, k, v)]
    assert_close(out.numpy(), ref.attention(*held, causal=True).out, "float32")
    want = ref.attention_gradients(np.ones(Q.shape), *held, causal=True)
    for got, expected in zip(grads[:3], want[:3], strict=True):
        assert_close(got.numpy(), expected, "float32")
    assert_close(leaf.grad.numpy(), want.q, "float32")
    assert_close(y.numpy(), layer(q).numpy(), "float32")


def test_explain_refuses_what_the_call_would():
    q, k, v = tensors()
    for function in (pa.attention, pa.explain):
        with pytest.raises(pa.BackendMismatchError, match=r"q: .* requires gradients"):
            function(q.requires_grad_(), k, v, backend="numpy")
    with pa.transfers("forbid"), pytest.raises(pa.BackendMismatchError, match="forbidden"):
        pa.explain(q.detach(), k, v, backend="numpy")


SECOND = {
    "softmax": lambda x: F.softmax(x),
    "layer_norm": lambda x: F.layer_norm(x),
    "linear": lambda x: F.linear(x, x[0].mT @ x[0]),
    "gelu": lambda x: F.gelu(x),
    "rms_norm": lambda x: F.rms_norm(x, x[0, 0], axes=1),
    "log_softmax": lambda x: F.log_softmax(x),
    "silu": lambda x: F.silu(torch.cat([x, torch.zeros_like(x), x * 1e4])),
    "swiglu": lambda x: F.swiglu(x, x.flip(0)),
    "geglu": lambda x: F.geglu(x, x.flip(0)),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2, 2]), x[0] * x[1]) ** 2,
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0) * 2),
    "cross_entropy": lambda x: F.cross_entropy(x[0], torch.tensor([0, 2, 1])),
    "attention_weights": lambda x: pa.attention_weights(x, x.flip(0), window=(1, 1)),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_are_right(name):
    """``create_graph=True`` goes through the backward as well: nothing that was saved counts as a constant."""
    x = torch.tensor(np.random.default_rng(0).standard_normal((2, 3, 4)), requires_grad=True)
    assert torch.autograd.gradgradcheck(SECOND[name], (x,))


class Reversed:
    """An array of another library, whose DLPack capsule has a negative stride."""

    def __init__(self, array):
        self.array = array

    strides = property(lambda self: self.array.strides)
    __dlpack__ = property(lambda self: self.array.__dlpack__)
    __dlpack_device__ = property(lambda self: self.array.__dlpack_device__)

    def copy(self):
        return Reversed(self.array.copy())


def test_negative_strides_are_copied_before_torch_aborts_on_them():
    array = np.arange(6.0)[::-1]
    assert torch.equal(registry.ready("torch").asarray(Reversed(array)), torch.tensor(array.copy()))
