"""torch.compile and torch.export: attention, layers and modules in one graph, with our own gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import polyattn as pa
from polyattn import functional as F
from polyattn.interop import torch as interop

pytestmark = [
    # What the compiler itself does:
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    torch._dynamo.reset()


def normal(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype).requires_grad_()


def inputs(n_q: int = 5, n_k: int = 7) -> tuple[Any, ...]:
    return normal(2, 4, n_q, 4), normal(2, 2, n_k, 4, seed=1), normal(2, 2, n_k, 3, seed=2)


def compare(function: Any, arrays: tuple[Any, ...], backend: str = "aot_eager", **options: Any) -> Any:
    """Compare a function's result and gradients with those of the function compiled in one graph; return that."""
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    agree(compiled, function, arrays)
    return compiled


def agree(compiled: Any, function: Any, arrays: tuple[Any, ...]) -> None:
    got, want = compiled(*arrays), function(*arrays)
    torch.testing.assert_close(got, want)
    dy = normal(*want.shape, seed=9, dtype=want.dtype).detach()
    moving = [x for x in arrays if x.requires_grad]
    for dx, expected in zip(torch.autograd.grad(got, moving, dy), torch.autograd.grad(want, moving, dy), strict=True):
        torch.testing.assert_close(dx, expected)


MASK = torch.from_numpy(np.random.default_rng(5).random((2, 1, 5, 7)) < 0.7)
CALLS = {
    "plain": {},
    "everything else": {
        "mask": MASK, "bias": normal(4, 5, 7, seed=3), "sinks": normal(4, seed=4), "softcap": 2.0, "dropout": 0.3,
        "seed": 2**63 + 5, "key_lengths": torch.tensor([7, 4]), "q_offset": torch.tensor([0, 2]), "causal": True,
        "segment_ids": (torch.zeros(5, dtype=torch.int32), torch.tensor([0, 0, 0, 0, 0, 1, 1], dtype=torch.int32)),
    },
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_attention_in_one_graph(call: str) -> None:
    """With what it is given by name, too: a bias has a gradient, and an integer is an argument of the program."""
    arguments = CALLS[call]
    named = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    settings = {name: x for name, x in arguments.items() if name not in named}

    def function(q: Any, k: Any, v: Any, *others: Any) -> Any:
        return pa.attention(q, k, v, **dict(zip(named, others, strict=True)), **settings)

    compare(function, (*inputs(), *named.values()))


def operations(x: Any, weight: Any) -> Any:
    x = F.layer_norm(F.linear(x, weight), weight[0], weight[1])
    x = F.rms_norm(F.gelu(x) + F.softmax(x), weight[2])
    return F.swiglu(F.rotary_embedding(x), F.silu(x)) + F.log_softmax(x)


def test_operations_in_one_graph() -> None:
    compare(operations, (normal(2, 5, 4), normal(4, 4, seed=1)))


def test_a_layer_in_one_graph() -> None:
    layer = pa.FeedForward(8, 4, activation="swiglu", dtype="float64", backend="torch")
    compare(lambda x: layer(x), (normal(2, 5, 8),))


def test_inductor_leaves_attention_whole() -> None:
    """There is nothing else, so no compiler of C++ is needed."""
    compare(lambda q, k, v: pa.attention(q, k, v, causal=True), inputs(), "inductor")


def test_a_module_in_one_graph() -> None:
    """The gradients of its parameters too; the same program computes other lengths."""
    module = interop.to_module(pa.MultiHeadAttention(8, 2, num_kv_heads=1, dtype="float64", backend="torch"))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, stance in ((5, "default"), (9, "fail_on_recompile")):
        x = normal(2, n, 8)
        with torch.compiler.set_stance(stance):
            y = compiled(x, causal=True)
        want = module(x, causal=True)
        torch.testing.assert_close(y, want)
        moving = [x, *module.parameters()]
        got, expected = (torch.autograd.grad(z.square().sum(), moving) for z in (y, want))
        torch.testing.assert_close(got, expected)


def test_lengths_are_not_compiled_in() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return pa.attention(q, k, v, causal=True)

    compiled = compare(function, inputs(5, 5), dynamic=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        agree(compiled, function, inputs(8, 8))


def attended(x: Any) -> Any:
    return pa.attention(x, x, x, causal=True, softcap=2.0)


TRANSFORMED = {
    "grad of softmax": torch.func.grad(lambda x: F.softmax(x).square().sum()),
    "vmap of grad": torch.func.vmap(torch.func.grad(lambda x: attended(x).square().sum())),
    "jvp": lambda x: torch.func.jvp(attended, (x,), (x.sin(),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_within_what_is_compiled(name: str) -> None:
    x = normal(2, 5, 4).detach()
    compiled = torch.compile(lambda x: TRANSFORMED[name](x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), TRANSFORMED[name](x))


def test_under_autocast_and_in_bfloat16() -> None:
    module = interop.to_module(pa.Projection(8, 3, backend="torch"))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = normal(2, 5, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = compiled(x), module(x)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want)
    (dx,) = torch.autograd.grad(got.sum(), x)
    assert dx.dtype == torch.float32


def test_another_library_breaks_the_graph_and_is_right() -> None:
    module = interop.to_module(pa.Projection(4, 3, dtype="float64", backend="numpy"))
    x = normal(2, 4)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="another library computes it"):
        torch.compile(module, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    agree(torch.compile(lambda x: module(x * 2) + 1, backend="aot_eager"), lambda x: module(x * 2) + 1, (x,))


def test_the_selection_is_that_of_the_compilation() -> None:
    compiled = torch.compile(lambda x: F.softmax(x), backend="aot_eager", fullgraph=True)
    x = normal(2, 4).detach()
    with pa.use_backend("torch"):
        want = compiled(x)
    with pa.use_backend("numpy"), pa.transfers("forbid"):
        torch.testing.assert_close(compiled(x), want)


def test_the_operators_are_as_torch_wants_them() -> None:
    """Their schema is true, their outlines are those of the results, and autograd is told of them."""
    from polyattn_torch._operators import arguments, problem_of

    q, k, v = inputs()
    bias, sinks = normal(4, 5, 7, seed=3), normal(4, seed=4)
    settings = (0, None, 5, True, None, None, 0.5, None, 0.25, None, None)
    given = (bias, None, sinks, MASK, *(None,) * 5, *settings, "tiled")
    assert arguments(problem_of(q, k, v, *given[:-1])) == given[:-1]
    torch.library.opcheck(torch.ops.polyattn.attention, (q, k, v, *given))
    out, *statistics = torch.ops.polyattn.attention(q, k, v, *given)
    saved = [x.detach() if isinstance(x, torch.Tensor) else x for x in (out, None, out, *statistics, q, k, v, *given)]
    torch.library.opcheck(torch.ops.polyattn.attention_backward, tuple(saved))
    want = pa.attention(
        q, k, v, bias=bias, sinks=sinks, mask=MASK, q_offset=0, seed=5, causal=True, scale=0.5, dropout=0.25
    )
    for got, expected in zip(*(torch.autograd.grad(y.sum(), (q, k, v, bias, sinks)) for y in (out, want)), strict=True):
        torch.testing.assert_close(got, expected)


def test_an_exported_program_has_attention_as_an_operator() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return pa.attention(x, x, x, causal=True, softcap=3.0)

    x = normal(2, 6, 4).detach()
    n = torch.export.Dim("n", min=2, max=64)
    program = torch.export.export(Model(), (x,), dynamic_shapes={"x": {1: n}})
    assert "polyattn.attention" in str(program)
    longer = normal(2, 9, 4).detach()
    torch.testing.assert_close(program.module()(longer), Model()(longer))
