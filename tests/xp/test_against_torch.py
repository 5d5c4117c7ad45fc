"""Values and gradients against torch's own operations and its autograd, in float64."""

import math

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close

torch = pytest.importorskip("torch", reason="torch is not installed, so there is nothing to compare with")
F = pa.functional
TF = torch.nn.functional
RNG = np.random.default_rng(53)


def leaf(x):
    return torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=True)


def theirs(function, hosts, dy):
    """Return torch's value, and its gradients of every input."""
    leaves = [leaf(x) for x in hosts]
    y = function(*leaves)
    gradients = torch.autograd.grad(y, leaves, torch.as_tensor(np.asarray(dy), dtype=torch.float64))
    return y.detach().numpy(), [gradient.numpy() for gradient in gradients]


def ours(name, make, to_np, hosts, dy, **options):
    y, cache = getattr(F, f"{name}_forward")(*(make(x) for x in hosts), **options)
    grads = getattr(F, f"{name}_backward")(make(dy), cache)
    return to_np(y), [to_np(gradient) for gradient in grads if gradient is not None]


def compare(got, want):
    assert_close(got[0], want[0], what="y")
    assert len(got[1]) == len(want[1])
    for position, (a, b) in enumerate(zip(got[1], want[1], strict=True)):
        assert_close(a, b, what=f"gradient {position}")


X, DX = RNG.standard_normal((3, 4, 6)), RNG.standard_normal((3, 4, 6))
GAIN, SHIFT = RNG.standard_normal(6), RNG.standard_normal(6)
GAINS, SHIFTS = RNG.standard_normal((4, 6)), RNG.standard_normal((4, 6))
WEIGHT, BIAS, DY = RNG.standard_normal((6, 5)), RNG.standard_normal(5), RNG.standard_normal((3, 4, 5))
OPERATIONS = {
    "softmax": ("softmax", {"axis": 1}, lambda x: torch.softmax(x, 1), (X,), DX),
    "linear": ("linear", {}, lambda x, w, b: TF.linear(x, w.T, b), (X, WEIGHT, BIAS), DY),
    "layer_norm": ("layer_norm", {}, lambda x, w, b: TF.layer_norm(x, (6,), w, b), (X, GAIN, SHIFT), DX),
    "layer_norm-bare": ("layer_norm", {"eps": 0.1}, lambda x: TF.layer_norm(x, (6,), eps=0.1), (X,), DX),
    "layer_norm-two-axes": (
        *("layer_norm", {"axes": 2}),
        *(lambda x, w, b: TF.layer_norm(x, (4, 6), w, b), (X, GAINS, SHIFTS), DX),
    ),
    "rms_norm": ("rms_norm", {}, lambda x, w: TF.rms_norm(x, (6,), w, eps=1e-5), (X, GAIN), DX),
    "rms_norm-two-axes": (
        *("rms_norm", {"axes": 2, "eps": 0.1}),
        *(lambda x, w: TF.rms_norm(x, (4, 6), w, eps=0.1), (X, GAINS), DX),
    ),
    "log_softmax": ("log_softmax", {"axis": 1}, lambda x: torch.log_softmax(x, 1), (X,), DX),
    "silu": ("silu", {}, TF.silu, (X,), DX),
    "swiglu": ("swiglu", {}, lambda gate, up: TF.silu(gate) * up, (X, DX), X + DX),
    "geglu": ("geglu", {}, lambda gate, up: TF.gelu(gate) * up, (X, DX), X + DX),
    "relu": ("relu", {}, TF.relu, (X,), DX),
    "gelu": ("gelu", {}, TF.gelu, (X,), DX),
    "gelu-tanh": ("gelu", {"approximate": "tanh"}, lambda x: TF.gelu(x, approximate="tanh"), (X,), DX),
    "mse_loss": ("mse_loss", {}, TF.mse_loss, (X, DX), 1.7),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_operation(make, to_np, case):
    name, options, function, hosts, dy = OPERATIONS[case]
    compare(ours(name, make, to_np, hosts, dy, **options), theirs(function, hosts, dy))


def test_embedding(make, to_np):
    indices = RNG.integers(0, 4, (3, 4))
    y, cache = F.embedding_forward(make(indices, "int64"), make(WEIGHT))
    dweight = F.embedding_backward(make(DY), cache).weight
    want = theirs(lambda weight: TF.embedding(torch.as_tensor(indices), weight), (WEIGHT,), DY)
    compare((to_np(y), [to_np(dweight)]), want)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [None, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(make, to_np, reduction, ignore_index, weighted):
    labels = RNG.integers(0, 6, (3, 4))
    labels[0, :2] = 3, 1
    weight = RNG.uniform(0.5, 2, 6) if weighted else None
    dy = RNG.standard_normal((3, 4)) if reduction == "none" else 0.8

    def function(logits):
        loss = TF.cross_entropy(
            logits.reshape(-1, 6),
            torch.as_tensor(labels).reshape(-1),
            weight=None if weight is None else torch.as_tensor(weight),
            ignore_index=-100 if ignore_index is None else ignore_index,
            reduction=reduction,
        )
        return loss.reshape(3, 4) if reduction == "none" else loss

    options = {"reduction": reduction, "ignore_index": ignore_index}
    native = make(weight) if weighted else None
    loss, cache = F.cross_entropy_forward(make(X), make(labels, "int64"), weight=native, **options)
    dlogits = F.cross_entropy_backward(make(dy), cache).logits
    compare((to_np(loss), [to_np(dlogits)]), theirs(function, (X,), dy))


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "bias", "scale", "grouped"])
def test_scaled_dot_product_attention(make, to_np, case):
    n_k = 5 if case == "causal" else 7  # torch aligns a causal mask upper left: only the square one is the same
    kv = 2 if case == "grouped" else 4
    q, k, v = (RNG.standard_normal((2, *s)) for s in ((4, 5, 8), (kv, n_k, 8), (kv, n_k, 6)))
    dout = RNG.standard_normal((2, 4, 5, 6))
    mask = RNG.random((2, 1, 5, 7)) < 0.6
    mask[..., 0] = True
    bias = RNG.standard_normal((4, 5, 7))
    own, other = {
        "plain": ({}, {}),
        "causal": ({"causal": True}, {"is_causal": True}),
        "mask": ({"mask": make(mask, "bool")}, {"attn_mask": torch.as_tensor(mask)}),
        "bias": ({"bias": make(bias)}, {}),
        "scale": ({"scale": 0.9}, {"scale": 0.9}),
        "grouped": ({}, {"enable_gqa": True}),
    }[case]
    hosts = (q, k, v, bias) if case == "bias" else (q, k, v)

    def function(q, k, v, bias=None):
        more = {} if bias is None else {"attn_mask": bias}
        return TF.scaled_dot_product_attention(q, k, v, **other, **more)

    out, cache = pa.attention_forward(make(q), make(k), make(v), **own)
    grads = [to_np(dx) for dx in pa.attention_backward(make(dout), cache) if dx is not None]
    compare((to_np(out), grads), theirs(function, hosts, dout))


def test_log_sum_exp_and_softcap_and_sinks(make, to_np):
    """Arguments that torch's attention lacks, written in elementary operations of torch, with the gradient of lse."""
    q, k, v, bias = (RNG.standard_normal(s) for s in ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6), (4, 1, 7)))
    sinks, dout, dlse = RNG.standard_normal(4), RNG.standard_normal((2, 4, 5, 6)), RNG.standard_normal((2, 4, 5))
    leaves = [leaf(x) for x in (q, k, v, bias, sinks)]
    scores = leaves[0] @ leaves[1].mT / math.sqrt(8)
    scores = 0.7 * torch.tanh(scores / 0.7) + leaves[3]
    scores = torch.cat([scores, leaves[4][:, None, None].expand(2, 4, 5, 1)], dim=-1)
    weights, lse = torch.softmax(scores, -1)[..., :-1], torch.logsumexp(scores, -1)
    total = torch.sum(weights @ leaves[2] * torch.as_tensor(dout)) + torch.sum(lse * torch.as_tensor(dlse))
    want = torch.autograd.grad(total, leaves)
    out, cache = pa.attention_forward(make(q), make(k), make(v), bias=make(bias), softcap=0.7, sinks=make(sinks))
    assert_close(to_np(out), (weights @ leaves[2]).detach().numpy())
    assert_close(to_np(cache.lse), lse.detach().numpy())
    for got, expected in zip(pa.attention_backward(make(dout), cache, dlse=make(dlse)), want, strict=True):
        assert_close(to_np(got), expected.numpy())


@pytest.mark.parametrize("inputs", ["self", "cross"])
@pytest.mark.parametrize("mask", [False, True])
def test_multi_head_attention(backend, make, to_np, inputs, mask):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    torch.nn.init.normal_(module.in_proj_bias)
    torch.nn.init.normal_(module.out_proj.bias)
    thirds = list(zip(("q", "k", "v"), module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True))
    parameters = {f"{name}_proj.weight": weight.T for name, weight, _ in thirds}
    parameters |= {f"{name}_proj.bias": bias for name, _, bias in thirds}
    parameters |= {"out_proj.weight": module.out_proj.weight.T, "out_proj.bias": module.out_proj.bias}
    layer = pa.MultiHeadAttention(16, 4, dtype="float64", backend=backend)
    layer = layer.with_parameters({name: make(p.detach().numpy()) for name, p in parameters.items()})

    x, context = RNG.standard_normal((2, 5, 16)), RNG.standard_normal((2, 7, 16))
    dy = RNG.standard_normal((2, 5, 16))
    keys = np.array([[True] * 4 + [False] * 3, [True] * 7])[:, : 5 if inputs == "self" else 7]
    own = {"mask": make(keys[:, None, None, :], "bool")} if mask else {}
    leaves = [leaf(x)] if inputs == "self" else [leaf(x), leaf(context)]
    padding = torch.as_tensor(~keys) if mask else None
    y, _ = module(leaves[0], leaves[-1], leaves[-1], key_padding_mask=padding, need_weights=False)
    named = dict(module.named_parameters())
    want = torch.autograd.grad(y, [*leaves, *named.values()], torch.as_tensor(dy))
    want_parameters = dict(zip(named, want[len(leaves) :], strict=True))

    got, cache = layer.forward(*(make(host) for host in (x, context)[: len(leaves)]), **own)
    back, grads = layer.backward(make(dy), cache)
    assert_close(to_np(got), y.detach().numpy())
    for name, expected in zip(("query", "key"), want[: len(leaves)], strict=False):
        assert_close(to_np(getattr(back, name)), expected.numpy(), what=name)
    for position, name in enumerate(("q", "k", "v")):
        weight, bias = (want_parameters[f"in_proj_{part}"].chunk(3)[position].numpy() for part in ("weight", "bias"))
        assert_close(to_np(grads[f"{name}_proj.weight"]), weight.T, what=f"{name}_proj.weight")
        # The gradient of the key's bias is zero by mathematics; what is left of it is rounding.
        scale = float(np.max(np.abs(weight))) if name == "k" else None
        assert_close(to_np(grads[f"{name}_proj.bias"]), bias, scale=scale, what=f"{name}_proj.bias")
    assert_close(to_np(grads["out_proj.weight"]), want_parameters["out_proj.weight"].numpy().T)
    assert_close(to_np(grads["out_proj.bias"]), want_parameters["out_proj.bias"].numpy())
