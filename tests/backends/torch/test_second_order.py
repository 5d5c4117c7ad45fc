"""torch's derivatives of derivatives, forward mode and their compositions: by what is written out, in linear memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import polyattn as pa
from polyattn import functional as F
from polyattn.backend import TiledKernel
from polyattn_torch._modes import Recorded

# torch's forward mode uses it itself:
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


MASK = torch.from_numpy(np.random.default_rng(5).random((2, 1, 3, 4)) < 0.7)
CALLS = {
    "plain": {},
    "fused, with a mask and sinks": {"mask": MASK, "sinks": normal(2, seed=4)},
    "softcap, bias and dropout": {
        "softcap": 1.5, "bias": normal(2, 3, 4, seed=3), "dropout": 0.25, "seed": torch.tensor(7), "causal": True,
    },
    "positions and lengths": {
        "bias": pa.relative_position_bias(normal(16, 2, seed=6), bidirectional=False), "window": (2, None),
        "key_lengths": torch.tensor([4, 0]), "q_offset": torch.tensor([1, 0]),
    },
}  # fmt: skip


@pytest.fixture(params=CALLS)
def call(request: Any) -> tuple[Any, list[Any]]:
    """Return attention as a function of what has gradients, and these arrays."""
    arguments = dict(CALLS[request.param])
    arrays = [normal(2, 2, 3, 2), normal(2, 1, 4, 2, seed=1), normal(2, 1, 4, 3, seed=2)]
    moving = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}

    def function(*given: Any) -> Any:
        return pa.attention(*given[:3], **{**arguments, **dict(zip(moving, given[3:], strict=True))})

    return function, [*arrays, *moving.values()]


def leaves(arrays: list[Any]) -> list[Any]:
    return [x.clone().requires_grad_() for x in arrays]


def test_gradgradcheck(call: Any) -> None:
    function, arrays = call
    assert torch.autograd.gradgradcheck(function, leaves(arrays), fast_mode=True)


def test_a_third_derivative(call: Any) -> None:
    function, arrays = call

    def hessian_product(*given: Any) -> Any:
        grads = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(x.sum() for x in grads), given, create_graph=True)

    assert torch.autograd.gradcheck(hessian_product, leaves(arrays), fast_mode=True)


def test_in_tiles(call: Any, contract: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second derivative, in many tiles and in one."""
    function, arrays = call

    def second(given: list[Any]) -> Any:
        grads = torch.autograd.grad(function(*given).sin().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in grads), given)

    want = second(leaves(arrays))
    monkeypatch.setattr(type(contract), "kernels", (Recorded(TiledKernel(tile=(2, 4))),))
    torch.testing.assert_close(second(leaves(arrays)), want)


def test_forward_mode(call: Any) -> None:
    """As central differences say; through torch.func and through dual numbers."""
    function, arrays = call
    arrays = [x.clone() for x in arrays]
    moved = tuple(normal(*x.shape, seed=8) for x in arrays)
    out, out_dot = torch.func.jvp(function, tuple(arrays), moved)
    torch.testing.assert_close(out, function(*arrays))
    above, below = (function(*(x + s * u for x, u in zip(arrays, moved, strict=True))) for s in (1e-6, -1e-6))
    torch.testing.assert_close(out_dot, (above - below) / 2e-6, rtol=1e-6, atol=1e-8)
    with torch.autograd.forward_ad.dual_level():
        dual = function(*(torch.autograd.forward_ad.make_dual(x, u) for x, u in zip(arrays, moved, strict=True)))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, out_dot)


def test_hessians_by_every_way(call: Any) -> None:
    function, arrays = call
    where = tuple(range(len(arrays)))

    def scalar(*given: Any) -> Any:
        return function(*given).sin().sum()

    reverse = torch.func.jacrev(torch.func.jacrev(scalar, where), where)(*arrays)
    forward = torch.func.jacfwd(torch.func.jacrev(scalar, where), where)(*arrays)
    torch.testing.assert_close(forward, reverse)
    torch.testing.assert_close(reverse, torch.autograd.functional.hessian(scalar, tuple(arrays)))


MODELS = {
    "attention layer": pa.MultiHeadAttention(4, 2, rotary=True, qk_norm="rms", sinks=True, dtype="float64"),
    "block": pa.TransformerBlock(4, 2, activation="swiglu", dtype="float64"),
}


@pytest.mark.parametrize("name", MODELS)
def test_hessians_of_layers(name: str) -> None:
    layer: Any = MODELS[name].to("torch")

    def scalar(x: Any) -> Any:
        return layer(x, causal=True).square().sum()

    x = normal(3, 4)
    want = torch.autograd.functional.hessian(scalar, x)
    torch.testing.assert_close(torch.func.hessian(scalar)(x), want)
    assert torch.autograd.gradgradcheck(scalar, (x.requires_grad_(),), fast_mode=True)


OPERATIONS = {
    "softmax": F.softmax,
    "log_softmax": F.log_softmax,
    "layer_norm": lambda x: F.layer_norm(x, x[0], x[1]),
    "rms_norm": lambda x: F.rms_norm(x, x[0]),
    "linear": lambda x: F.linear(x, x.mT @ x),
    "gelu": F.gelu,
    "swiglu": lambda x: F.swiglu(x, x.flip(0)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 2, 1])),
    "attention_weights": lambda x: pa.attention_weights(x, x.flip(0), causal=True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_hessians_of_operations(name: str) -> None:
    def scalar(x: Any) -> Any:
        return OPERATIONS[name](x).sin().sum()

    x = normal(3, 4)
    torch.testing.assert_close(torch.func.hessian(scalar)(x), torch.autograd.functional.hessian(scalar, x))


def test_forward_mode_of_each_of_a_batch() -> None:
    q, u = normal(3, 2, 4, 2), normal(3, 2, 4, 2, seed=1)

    def along(q: Any, u: Any) -> Any:
        return torch.func.jvp(lambda q: pa.attention(q, q, q, causal=True), (q,), (u,))[1]

    torch.testing.assert_close(torch.func.vmap(along)(q, u), along(q, u))


def test_memory_of_a_second_derivative_is_linear() -> None:
    """Twice the length, and twice as much is kept for the way back: no scores, of which there are four times more."""
    kept = []
    for n in (512, 1024):
        q = normal(1, n, 4).float().requires_grad_()
        sizes: list[int] = []

        def pack(x: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            (dq,) = torch.autograd.grad(pa.attention(q, q, q, softcap=5.0).sum(), q, create_graph=True)
            dq.square().sum().backward()
        assert max(sizes) <= q.numel()
        kept.append(sum(sizes))
    assert kept[1] < 2.1 * kept[0]
