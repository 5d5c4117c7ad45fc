"""polyattn where torch's training pipelines put it: checkpointing, autocast, workers, files, and another library."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import polyattn as pa
from polyattn.interop import torch as interop


@pytest.fixture(params=["torch", "numpy"])
def where(request: Any) -> str:
    """Say where ours are computed: in torch, or elsewhere, which other tests say of every library."""
    return str(request.param)


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype).requires_grad_()


def model(where: str) -> Any:
    """Return torch's layers and ours, these on some backend."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        interop.to_module(pa.TransformerBlock(8, 2, dtype="float32", backend=where, seed=1)),
        torch.nn.Tanh(),
        interop.to_module(pa.Projection(8, 6, backend=where, seed=2)),
    )


def gradients(function: Any, moving: list[Any]) -> list[Any]:
    return list(torch.autograd.grad(function().square().sum(), moving))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_are_computed_again(where: str, reentrant: bool) -> None:
    """Whichever way: a forward within a backward gives the same gradients, dropout too."""
    module = interop.to_module(pa.MultiHeadAttention(8, 2, dtype="float64", backend=where))
    x, moving = normal(2, 5, 8), list(module.parameters())

    def block(x: Any) -> Any:
        return interop.attention(*(module(x, causal=True, dropout=0.2, seed=3),) * 3, softcap=2.0, backend=where)

    want = gradients(lambda: block(x), [x, *moving])
    checkpoint(block, x, use_reentrant=reentrant).square().sum().backward()
    got = [y.grad for y in (x, *moving)]
    torch.testing.assert_close(got, want)


def test_a_model_on_another_library_takes_the_same_steps(where: str) -> None:
    """Its gradients are torch's, step by step, and so are its parameters after them."""
    ours, theirs = model(where), model("torch")
    data = normal(16, 5, 6, dtype=torch.float32).detach()
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (ours, theirs)]
    for _ in range(4):
        for m, optimiser in zip((ours, theirs), optimisers, strict=True):
            optimiser.zero_grad()
            (m(data) - data.flip(1)).square().mean().backward()
            optimiser.step()
        for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(x.grad, y.grad, rtol=1e-4, atol=1e-6), name
    torch.testing.assert_close(ours(data), theirs(data), rtol=1e-4, atol=1e-5)


def test_a_model_is_saved_and_loaded(where: str) -> None:
    """As a whole, and as the state dict that another process gets."""
    first = model(where)
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.add_(torch.rand_like(parameter))
    x = normal(2, 5, 6, dtype=torch.float32).detach()
    files = [io.BytesIO(), io.BytesIO()]
    torch.save(first, files[0])
    torch.save(first.state_dict(), files[1])
    for file in files:
        file.seek(0)
    whole, other = torch.load(files[0], weights_only=False), model(where)
    other.load_state_dict(torch.load(files[1], weights_only=True))
    for again in (whole, other):
        torch.testing.assert_close(again(x), first(x), rtol=0, atol=0)
        assert list(again.state_dict()) == list(first.state_dict())


def test_a_module_is_moved_to_another_dtype(where: str) -> None:
    module = interop.to_module(pa.TransformerBlock(8, 2, backend=where))
    x = normal(2, 5, 8, dtype=torch.float32)
    want = module(x)
    double = module.double()(x.double())
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), want, rtol=1e-5, atol=1e-5)
    double.sum().backward()
    assert {p.grad.dtype for p in module.parameters()} == {torch.float64}


def test_parameters_that_are_shared() -> None:
    module = interop.to_module(pa.MultiHeadAttention(8, 2, backend="torch"))
    module.k_proj.weight = module.q_proj.weight
    module(torch.ones(1, 3, 8)).sum().backward()
    assert module.q_proj.weight.grad is module.k_proj.weight.grad is not None


def test_parameters_that_are_handed_in(where: str) -> None:
    """As torch.func.functional_call does, for an ensemble or a step that is taken on trial."""
    module = interop.to_module(pa.Projection(4, 3, dtype="float64", backend=where))
    weight, x = normal(4, 3, seed=1), normal(2, 4).detach()
    y = torch.func.functional_call(module, {"weight": weight}, (x,))
    torch.testing.assert_close(y, x @ weight + module.bias)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), weight)[0], x.sum(0)[:, None].expand(4, 3))


# ---- autocast ------------------------------------------------------------------------------------------------------


def test_attention_is_lowered_as_torchs_own_is() -> None:
    """Mixed inputs are taken to one dtype, results have it, and gradients the dtype of what they are of."""
    q, k, v = normal(2, 3, 5, 4, dtype=torch.float32), normal(2, 3, 7, 4, seed=1), normal(2, 3, 7, 4, seed=2)
    k, v = k.detach().bfloat16().requires_grad_(), v.detach().float().requires_grad_()
    both = (interop.attention, torch.nn.functional.scaled_dot_product_attention)
    results = []
    for function in both:
        with torch.autocast("cpu", torch.bfloat16):
            out = function(q, k, v)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    assert results[0][0].dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        double = (x.detach().double() for x in (q, k, v))
        assert interop.attention(*double).dtype == torch.float64


def test_modules_under_autocast(where: str) -> None:
    """After one of torch's own, whose result autocast lowers; torch's compute in it, others in their own dtype."""
    mixed = model(where)
    x = normal(2, 5, 6, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixed(x)
    assert y.dtype == (torch.bfloat16 if where == "torch" else torch.float32)
    torch.testing.assert_close(y.float(), mixed(x), rtol=0.1, atol=0.1)
    y.float().sum().backward()
    assert {p.grad.dtype for p in (x, *mixed.parameters())} == {torch.float32}


# ---- processes -----------------------------------------------------------------------------------------------------


def test_workers_of_a_loader(program: Any) -> None:
    """Forked while the parent has threads: they do not hang, and give the parent's numbers."""
    assert program("torch_workers", PYTHONWARNINGS="error") == "as in the parent"
