"""polyattn.interop.torch: attention and layers with gradients by autograd, computed by any backend."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import polyattn as pa

torch = pytest.importorskip("torch", reason='pip install "polyattn[torch]"')
interop = pytest.importorskip("polyattn.interop.torch")


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).requires_grad_()


def formula(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + bias, dim=-1) @ v


def test_attention_is_differentiable_everywhere(place: str) -> None:
    inputs = normal(2, 3, 5, 4), normal(2, 3, 7, 4, seed=1), normal(2, 3, 7, 6, seed=2), normal(3, 5, 7, seed=3)
    dout = normal(2, 3, 5, 6, seed=4).detach()
    q, k, v, bias = inputs
    out = interop.attention(q, k, v, bias=bias, backend=place)
    want = formula(*inputs)
    torch.testing.assert_close(out, want)
    for got, expected in zip(
        torch.autograd.grad(out, inputs, dout), torch.autograd.grad(want, inputs, dout), strict=True
    ):
        torch.testing.assert_close(got, expected)


def test_gradcheck_elsewhere(place: str) -> None:
    q, k, v, sinks = normal(2, 3, 2), normal(2, 4, 2, seed=1), normal(2, 4, 3, seed=2), normal(2, seed=3)

    def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return interop.attention(q, k, v, sinks=sinks, causal=True, backend=place)

    assert torch.autograd.gradcheck(call, (q, k, v, sinks))
    if place == "torch":
        assert torch.autograd.gradgradcheck(call, (q, k, v, sinks))


def test_a_second_derivative_elsewhere_is_refused() -> None:
    q = normal(2, 3, 2)
    out = interop.attention(q, q, q, backend="numpy")
    with pytest.raises(pa.BackendMismatchError, match="create_graph=True: expected a call that torch computes"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_the_selection_in_force_counts(place: str) -> None:
    q = normal(1, 3, 4)
    with pa.use_backend(place), pa.transfers() as account:
        interop.attention(q, q, q).sum().backward()
    assert (account.count > 0) == (place != "torch")
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("arguments", [{}, {"causal": True, "bias": True}], ids=["plain", "causal-bias"])
def test_a_module_has_the_layers_results_and_gradients(place: str, arguments: dict[str, Any]) -> None:
    layer = pa.MultiHeadAttention(8, 2, num_kv_heads=1, dtype="float64", backend=place, seed=5)
    module = interop.to_module(layer)
    assert list(module.state_dict()) == sorted(layer.parameters(), key=list(module.state_dict()).index)
    x, context, dy = normal(2, 5, 8), normal(2, 6, 8, seed=1), normal(2, 5, 8, seed=2).detach()
    arguments = {**arguments, "bias": normal(2, 5, 6, seed=3)} if "bias" in arguments else arguments
    y = module(x, context, **arguments)
    y.backward(dy)
    here = layer.to(place)
    given = {name: a.detach() if isinstance(a, torch.Tensor) else a for name, a in arguments.items()}
    want, cache = here.forward(x.detach(), context.detach(), **given)
    inputs, grads = here.backward(dy, cache)
    torch.testing.assert_close(y.detach(), want)
    torch.testing.assert_close(x.grad, inputs.query)
    torch.testing.assert_close(context.grad, inputs.key)
    if "bias" in arguments:
        torch.testing.assert_close(arguments["bias"].grad, inputs.bias)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, pa.to_backend(grads[name], "torch"))


def test_a_module_trains(place: str) -> None:
    module = interop.to_module(pa.FeedForward(4, 8, backend=place))
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((16, 4), dtype=np.float32))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimiser, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(20):
        optimiser.zero_grad()
        loss = (module(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    module.load_state_dict(before)
    assert (module(x) - x.flip(-1)).square().mean().item() == pytest.approx(losses[0])


def test_the_layers_own_parameters_stay_as_they_were() -> None:
    layer = pa.Projection(3, 2, backend="torch")
    module = interop.to_module(layer)
    before = layer.parameters()["weight"].clone()
    with torch.no_grad():
        module.weight += 1
    torch.testing.assert_close(layer.parameters()["weight"], before)


def test_modules_are_copied_and_pickled(place: str) -> None:
    module = interop.to_module(pa.MultiHeadAttention(8, 2, backend=place))
    x = torch.ones(1, 3, 8)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), module(x))
        assert other.q_proj.weight is not module.q_proj.weight
    layer = pa.MultiHeadAttention(8, 2, backend=place)
    restored = pickle.loads(pickle.dumps(layer))
    assert repr(restored) == repr(layer)
    assert restored.with_parameters(layer.parameters()) is not None


@pytest.mark.parametrize("bias", [True, False])
def test_attention_with_separate_projections_becomes_ours_and_back(place: str, bias: bool) -> None:
    module = torch.nn.MultiheadAttention(8, 2, bias=bias, kdim=6, vdim=3, batch_first=True, dtype=torch.float64)
    layer: Any = interop.from_module(module, backend=place)
    given = [normal(2, n, width).detach() for n, width in ((5, 8), (7, 6), (7, 3))]
    torch.testing.assert_close(layer(*given), module(*given)[0].detach())
    other = torch.nn.MultiheadAttention(8, 2, bias=bias, kdim=6, vdim=3, dtype=torch.float64)
    interop.copy_to(layer, other)
    assert {"q_proj_weight", "k_proj_weight", "v_proj_weight"} <= set(other.state_dict())
    for name, value in module.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("bias", [True, False])
def test_torchs_layers_become_ours(place: str, bias: bool) -> None:
    x = normal(2, 5, 8).detach()
    attention = torch.nn.MultiheadAttention(8, 2, bias=bias, batch_first=True, dtype=torch.float64)
    for module in (attention, torch.nn.Linear(8, 3, bias=bias).double(), torch.nn.LayerNorm(8, eps=1e-3, bias=bias)):
        module = module.double()
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.add_(normal(*parameter.shape, seed=number) * 0.1)
        want = module(x, x, x)[0] if module is attention else module(x)
        layer: Any = interop.from_module(module, backend=place)
        torch.testing.assert_close(layer(x), want.detach())
        other = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        interop.copy_to(layer, other)
        for name, value in module.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (torch.nn.ReLU(), r"module: expected one of nn.MultiheadAttention, .*, nn.LayerNorm, nn.Linear, got ReLU"),
        (torch.nn.MultiheadAttention(8, 2, add_bias_kv=True), "nn.MultiheadAttention without add_bias_kv, which"),
        (torch.nn.MultiheadAttention(8, 2, kdim=4, add_zero_attn=True), "without add_zero_attn, which"),
        (torch.nn.LayerNorm((3, 4)), "expected a LayerNorm of the last axis with weights"),
        (torch.nn.LayerNorm(4, elementwise_affine=False), "expected a LayerNorm of the last axis with weights"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_what_has_no_counterpart_is_refused(module: Any, told: str) -> None:
    with pytest.raises(pa.ArgumentError, match=told):
        interop.from_module(module)


def test_parameters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(pa.ArgumentError, match="module: expected one that is a Projection, got LayerNorm"):
        interop.copy_to(pa.Projection(4, 4), torch.nn.LayerNorm(4))
    with pytest.raises(pa.CheckpointError, match=r"weight: expected \(4, 3\) float32, got \(4, 2\) float32"):
        interop.copy_to(pa.Projection(4, 2), torch.nn.Linear(4, 3))
    module = torch.nn.LayerNorm(4)
    with pytest.raises(pa.CheckpointError, match="module: expected one like LayerNorm"):
        interop.copy_to(pa.LayerNorm(4, eps=1e-3), module)
