"""torch.compile(fullgraph=True): every operation, mask, bias, scaling and layer, with static and with symbolic numbers.

``dynamic=True`` makes lengths symbolic, and with them every number that a function finds outside: arguments, fields of
objects, constants of modules. Automatic dynamic shapes compile a static program first, and a symbolic one for the
second length. What a row makes is made inside of the compiled function and outside of it.

Each run of the suite has a part of the table; ``nox -s compile`` has all of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import polyattn as pa
from polyattn import functional as F

pytestmark = [
    # What the compiler itself does:
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Row(NamedTuple):
    """What is made, the call that uses it, and the call's tensors for a length."""

    made: Callable[[], Any] | None
    call: Callable[..., Any]
    tensors: Callable[[int], tuple[Any, ...]]


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).requires_grad_()


def heads(n: int) -> tuple[Any, ...]:
    return (normal(2, 4, n, 4),)


def features(n: int) -> tuple[Any, ...]:
    return (normal(2, n, 8),)


def two(n: int) -> tuple[Any, ...]:
    return normal(2, n, 4), normal(2, n, 4, seed=1)


def qkv(n: int) -> tuple[Any, ...]:
    return normal(2, 4, n, 4), normal(2, 4, n, 4, seed=1), normal(2, 4, n, 4, seed=2)


def few_blocks(_: int) -> tuple[Any, ...]:
    """A block mask is for one length."""
    return qkv(12)


def with_table(n: int) -> tuple[Any, ...]:
    return *qkv(n), normal(8, 4, seed=3)


def constants(tensors: Callable[[int], tuple[Any, ...]]) -> Callable[[int], tuple[Any, ...]]:
    """Return the tensors without a graph, for what has a backward of its own."""
    return lambda n: tuple(x.detach() for x in tensors(n))


def attended(arguments: Any, q: Any, k: Any, v: Any) -> Any:
    return pa.attention(q, k, v, **arguments)


def weighted(arguments: Any, q: Any, k: Any, v: Any) -> Any:
    return pa.attention_weights(q, k, **arguments) @ v


def own_backward(arguments: Any, q: Any, k: Any, v: Any) -> Any:
    out, cache = pa.attention_forward(q, k, v, **arguments)
    return torch.stack(pa.attention_backward(out, cache)[:3])


def second(arguments: Any, q: Any, k: Any, v: Any) -> Any:
    _, cache = pa.attention_forward(q, k, v, **arguments)
    return torch.stack(pa.attention_backward_vjp((q, k, v, None, None), v, cache)[:1])


def merged(_: Any, q: Any, k: Any, v: Any) -> Any:
    (out, cache), (other, other_cache) = pa.attention_forward(q, k, v), pa.attention_forward(q, k + 1, v)
    return pa.attention_merge([(out, cache.lse), (other, other_cache.lse)])[0]


def relative(arguments: Any, q: Any, k: Any, v: Any, table: Any) -> Any:
    return pa.attention(q, k, v, bias=pa.relative_position_bias(table, **arguments))


def relative_weights(arguments: Any, q: Any, k: Any, v: Any, table: Any) -> Any:
    return pa.attention_weights(q, k, bias=pa.relative_position_bias(table, **arguments)) @ v


def rotated(arguments: Any, x: Any) -> Any:
    return F.rotary_embedding(x, **arguments)


def scaled(scalings: Any, x: Any) -> Any:
    return torch.stack([F.rotary_embedding(x, scaling=scaling) for scaling in scalings])


def rotated_at(arguments: Any, x: Any) -> Any:
    return F.rotary_embedding(x, positions=torch.arange(x.shape[-2]) + 2, **arguments)


def pair(operation: str) -> Callable[..., Any]:
    """Return the call of an operation's own forward and backward."""
    forward, backward = getattr(F, f"{operation}_forward"), getattr(F, f"{operation}_backward")

    def call(arguments: Any, *tensors: Any) -> Any:
        y, cache = forward(*tensors, **arguments)
        return backward(y, cache)[0]

    return call


def functions(*names: str) -> Callable[..., Any]:
    return lambda arguments, *tensors: torch.stack([getattr(F, name)(*tensors, **arguments) for name in names])


def losses(arguments: Any, x: Any, y: Any) -> Any:
    labels = torch.arange(x.shape[-2]).expand(x.shape[:-1]) % 3
    return F.cross_entropy(x, labels, **arguments) + F.cross_entropy(x, F.softmax(y)) + F.mse_loss(x, y)


def looked_up(_: Any, weight: Any, other: Any) -> Any:
    return F.embedding(torch.arange(weight.shape[-2]) % 2, weight[0]) + F.linear(other[0], weight[0, :4])


class Steps(F.RotaryScaling):
    """A scaling that is no dataclass, with a field of its own."""

    def __init__(self, steps: tuple[float, ...]) -> None:
        object.__setattr__(self, "steps", steps)

    def frequencies(self, dim: int, base: float) -> Any:
        return super().frequencies(dim, base) / np.asarray(self.steps)


NUMBERS = {
    "scale": 0.3, "softcap": 2.0, "dropout": 0.25, "seed": 7, "causal": True, "window": (3, None), "q_offset": 1,
    "key_lengths": 4,
}  # fmt: skip
SOME = {name: x for name, x in NUMBERS.items() if name not in ("dropout", "seed")}
BLOCKS = [[True, False], [True, True]]
HERE: dict[str, Any] = {"dtype": "float64", "backend": "torch"}


def layer(layer: Any, *, backward: bool = False, **arguments: Any) -> Callable[..., Any]:
    """Return a layer's call, or its own forward and backward."""

    def call(made: Any, *tensors: Any) -> Any:
        return layer(*tensors, **arguments, **(made or {}))

    def both(_: Any, *tensors: Any) -> Any:
        y, cache = layer.forward(*tensors, **arguments)
        inputs, grads = layer.backward(y, cache)
        return inputs[0] + sum(dx.sum() for dx in grads.values())

    return both if backward else call


def stacked(arguments: Any, x: Any) -> Any:
    return BLOCK(BLOCK(x, **arguments), causal=True)


def embedded(_: Any, x: Any) -> Any:
    return EMBEDDING(torch.arange(x.shape[1]) % 3) * x


MASK, ALIBI = pa.block_mask(BLOCKS, 6), pa.alibi_bias(4)
EMBEDDING = pa.Embedding(3, 8, **HERE)
ATTENTION = pa.MultiHeadAttention(
    8, 2, num_kv_heads=1, rotary={"base": 5e5, "scaling": F.YaRNScaling(2.0, 16)}, qk_norm="rms", sinks=True, **HERE
)
BLOCK = pa.TransformerBlock(8, 2, 16, rotary=True, norm="rms", activation="swiglu", **HERE)
ROWS = {
    "attention": Row(None, lambda _, q, k, v: attended({"causal": True}, q, k, v), qkv),
    "attention, numbers": Row(lambda: dict(NUMBERS), attended, qkv),
    "attention, made mask": Row(lambda: {"mask": torch.ones(2, 1, 1, 1, dtype=torch.bool)}, attended, qkv),
    "alibi": Row(lambda: {"bias": pa.alibi_bias(4, max_bias=4.0), "causal": True}, attended, qkv),
    "prefix": Row(lambda: {"mask": pa.prefix_mask(2)}, attended, qkv),
    "prefixes": Row(lambda: {"mask": pa.prefix_mask([2, 3]) & pa.prefix_mask(9)}, attended, qkv),
    "blocks": Row(lambda: {"mask": pa.block_mask(BLOCKS, 6)}, attended, few_blocks),
    "both": Row(lambda: {"mask": pa.block_mask(BLOCKS, (6, 6)) & pa.prefix_mask(2)}, attended, few_blocks),
    "relative positions": Row(lambda: {"max_distance": 20}, relative, with_table),
    "weights": Row(
        lambda: {**SOME, "bias": pa.alibi_bias(4), "mask": pa.prefix_mask([2, 3])}, weighted, constants(qkv)
    ),
    "weights, blocks": Row(
        lambda: {"mask": pa.block_mask(BLOCKS, 6), "key_lengths": torch.tensor([3, 4])}, weighted,
        constants(few_blocks),
    ),
    "weights, relative positions": Row(None, lambda _, *tensors: relative_weights({}, *tensors), with_table),
    "weights, float64 bias": Row(
        None, lambda _, q, k, v: pa.attention_weights(q.float(), k.float(), bias=v @ v.mT), constants(qkv)
    ),
    "attention's own backward": Row(lambda: {"bias": pa.alibi_bias(4)}, own_backward, constants(qkv)),
    "attention's jvp": Row(
        None, lambda _, q, k, v: pa.attention_jvp(q, k, v, (q, k, v), mask=MASK, bias=ALIBI, softcap=2.0)[1],
        constants(few_blocks),
    ),
    "attention's second order": Row(None, lambda _, *tensors: second({}, *tensors), constants(qkv)),
    "merge": Row(None, merged, constants(qkv)),
    "rotary": Row(None, lambda _, x: F.rotary_embedding(x), heads),
    "rotary, base": Row(lambda: {"base": 5e5, "offset": 3, "dim": 2}, rotated, heads),
    "rotary, offsets": Row(lambda: {"offset": torch.tensor([3, 4]), "interleaved": True}, rotated, heads),
    "rotary, tables": Row(lambda: {"tables": (torch.ones(20, 2), torch.zeros(20, 2))}, rotated_at, heads),
    "rotary, scalings": Row(lambda: (F.LinearScaling(2.0), F.NTKScaling(2)), scaled, heads),
    "rotary, more scalings": Row(lambda: (F.YaRNScaling(2.0, 16), F.Llama3Scaling(), Steps((1.0, 2.0))), scaled, heads),
    "rotary's own backward": Row(lambda: {"base": 5e5}, pair("rotary_embedding"), constants(heads)),
    "norms": Row(lambda: {"eps": 1e-3}, functions("layer_norm", "rms_norm"), heads),
    "norm's own backward": Row(lambda: {"eps": 1e-3}, pair("layer_norm"), constants(heads)),
    "softmax": Row(lambda: {"axis": -2}, functions("softmax", "log_softmax"), heads),
    "softmax's own backward": Row(None, lambda _, x: pair("softmax")({}, x), constants(heads)),
    "activations": Row(None, lambda _, x: functions("gelu", "relu", "silu")({}, x), heads),
    "gelu, tanh": Row(lambda: {"approximate": "tanh"}, functions("gelu"), heads),
    "halves": Row(None, lambda _, *tensors: functions("geglu", "swiglu")({}, *tensors), two),
    "losses": Row(lambda: {"ignore_index": 1, "reduction": "sum"}, losses, two),
    "embedding and linear": Row(None, looked_up, two),
    "Projection": Row(None, layer(pa.Projection(8, 3, **HERE)), features),
    "LayerNorm": Row(None, layer(pa.LayerNorm(8, **HERE)), features),
    "RMSNorm": Row(None, layer(pa.RMSNorm(8, **HERE)), features),
    "Embedding": Row(None, embedded, features),
    "FeedForward": Row(None, layer(pa.FeedForward(8, 16, activation="relu", **HERE)), features),
    "ScaledDotProductAttention": Row(None, layer(pa.ScaledDotProductAttention(scale=0.3, **HERE), causal=True), qkv),
    "MultiHeadAttention": Row(None, layer(ATTENTION, window=(3, None)), features),
    "MultiHeadAttention's own backward": Row(None, layer(ATTENTION, backward=True), constants(features)),
    "TransformerBlock": Row(lambda: {"bias": pa.alibi_bias(2), "mask": pa.prefix_mask(3)}, stacked, features),
}  # fmt: skip
MODES: dict[str, Any] = {"static": {"dynamic": False}, "dynamic": {"dynamic": True}, "automatic": {}}
SLOW = (  # seconds to trace, so in the long part; two calls are in one row already, or would take too long
    "rotary, scalings", "weights, relative positions", "MultiHeadAttention", "MultiHeadAttention's own backward",
    "TransformerBlock",
)  # fmt: skip
EVERY_RUN = {  # besides dynamic=True for what is made outside
    ("prefix", "inside", "dynamic"), ("rotary, scalings", "inside", "dynamic"), ("alibi", "inside", "static"),
    ("attention, numbers", "outside", "automatic"), ("rotary, base", "outside", "automatic"),
    ("norms", "outside", "automatic"), ("TransformerBlock", "outside", "dynamic"),
}  # fmt: skip


def in_every_run(*case: str) -> bool:
    row, place, mode = case
    return case in EVERY_RUN or (mode == "dynamic" and place != "inside" and row not in SLOW)


CASES = [
    pytest.param(row, place, mode, marks=[] if in_every_run(row, place, mode) else pytest.mark.long)
    for row in ROWS
    for place in (("inside", "outside") if ROWS[row].made else ("",))
    for mode in MODES
]


@pytest.fixture(autouse=True)
def _nothing_compiled_yet(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # pytest would keep each of its records


@pytest.mark.parametrize(("row", "place", "mode"), CASES)
def test_in_one_graph(row: str, place: str, mode: str) -> None:
    compare(row, place, mode, "eager")


def long(*rows: str) -> list[Any]:
    return [pytest.param(row, marks=pytest.mark.long) for row in rows]


@pytest.mark.parametrize("row", ["rotary, base", *long("prefixes", "relative positions")])
def test_with_a_backward_that_is_compiled(row: str) -> None:
    compare(row, "outside", "dynamic", "aot_eager")


@pytest.mark.parametrize("row", ["alibi", *long("blocks", "relative positions")])
def test_inductor_takes_structured_attention_as_one_operator(row: str) -> None:
    """There is nothing else, so no compiler of C++ is needed."""
    compare(row, "outside", "dynamic", "inductor")


def compare(row: str, place: str, mode: str, backend: str) -> None:
    """Compare results and gradients with those of the function itself, and see that other lengths need no program."""
    made, call, tensors = ROWS[row]
    outside = made() if made and place == "outside" else None
    differentiated = any(x.requires_grad for x in tensors(1))
    calls = 2 if differentiated and mode == "dynamic" and row not in SLOW else 1  # two subgraphs share their constants

    def function(*tensors: Any) -> Any:
        return sum(call(made() if made and place == "inside" else outside, *tensors) for _ in range(calls))

    compiled = torch.compile(function, backend=backend, fullgraph=True, **MODES[mode])
    for count, n in enumerate((5, 8, 11)[: {"static": 1, "dynamic": 2, "automatic": 3}[mode]]):
        ready = count == (1 if mode == "dynamic" else 2)
        xs = tensors(n)
        with torch.compiler.set_stance("fail_on_recompile") if ready else contextlib.nullcontext():
            got = compiled(*xs)
        want = function(*xs)
        torch.testing.assert_close(got, want)
        moving = [x for x in xs if x.requires_grad]
        if moving:
            dy = normal(*want.shape, seed=9).detach().to(want.dtype)
            for dx, expected in zip(*(torch.autograd.grad(y, moving, dy) for y in (got, want)), strict=True):
                torch.testing.assert_close(dx, expected)


def test_two_programs_for_two_masks() -> None:
    """A structured mask is static: another one is another program, and an equal one is the same."""
    compiled = torch.compile(lambda mask, x: pa.attention(x, x, x, mask=mask), backend="eager", fullgraph=True)
    (x,) = constants(heads)(7)
    for length in (2, 3):
        torch.testing.assert_close(
            compiled(pa.prefix_mask(length), x), pa.attention(x, x, x, mask=pa.prefix_mask(length))
        )
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(pa.prefix_mask(2), x)


@pytest.mark.parametrize("make", [lambda x: pa.prefix_mask(x), lambda x: pa.block_mask(x.reshape(1, 1) > 0, 8)])
def test_a_mask_of_traced_values_says_what_is_wrong(make: Any) -> None:
    (x,) = constants(heads)(7)
    compiled = torch.compile(lambda n: pa.attention(x, x, x, mask=make(n)), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="expected values that are known before"):
        compiled(torch.tensor(2))


def test_a_fresh_process_compiles_first(program: Any) -> None:
    """No call of polyattn before it, and no import of polyattn.interop.torch."""
    program("torch_compiled_first")
