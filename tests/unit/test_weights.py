"""polyattn.interop.weights: names and shapes of torch, Keras and Flax, exact in both directions, and the errors.

The libraries themselves are compared with in tests/xp (torch) and in ``nox -s interop``; here their names and shapes
are written down, and what they compute is a formula on arrays of those shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import polyattn as pa
from polyattn.interop import weights as W
from polyattn.testing import references as ref

Arrays = dict[str, Any]
WIDTH, HEADS = 8, 2
LAYERS: dict[str, Any] = {
    "linear": pa.Projection(WIDTH, 3, dtype="float64"),
    "norm": pa.LayerNorm(WIDTH, bias=False, dtype="float64"),
    "rms": pa.RMSNorm(WIDTH, dtype="float64"),
    "words": pa.Embedding(5, WIDTH, dtype="float64"),
    "encoder.layers.0": pa.TransformerBlock(WIDTH, HEADS, 12, norm_first=False, activation="relu", dtype="float64"),
    "attention": pa.MultiHeadAttention(WIDTH, HEADS, dtype="float64"),
    "bare": pa.MultiHeadAttention(WIDTH, HEADS, bias=False, dtype="float64"),
}
GROUPED = pa.MultiHeadAttention(WIDTH, 4, 2, head_dim=3, dtype="float64")
WIDE = pa.MultiHeadAttention(WIDTH, HEADS, head_dim=3, value_dim=5, dtype="float64")
NORMED = pa.MultiHeadAttention(WIDTH, HEADS, qk_norm="layer", bias=False, dtype="float64")
X = np.random.default_rng(0).standard_normal((2, 5, WIDTH))


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def drawn_for(layers: Any, seed: int = 1) -> Arrays:
    return drawn({name: tuple(x.shape) for name, x in W.parameters_of(layers).items()}, seed)


def shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: x.shape for name, x in arrays.items()}


def flat(nested: Arrays, prefix: str = "") -> Arrays:
    found: Arrays = {}
    for name, x in nested.items():
        found |= flat(x, f"{prefix}{name}.") if isinstance(x, dict) else {prefix + name: x}
    return found


def separate_to_torch(parameters: Arrays, layers: Any) -> Arrays:
    return W.to_torch(parameters, layers, packed=False)


WAYS: dict[str, Any] = {
    "torch": (W.from_torch, W.to_torch, LAYERS),
    "torch-separate": (W.from_torch, separate_to_torch, LAYERS),
    "torch-one": (W.from_torch, W.to_torch, LAYERS["encoder.layers.0"]),
    "keras": (W.from_keras, W.to_keras, {"encoder/attention": LAYERS["attention"], "grouped": GROUPED, "wide": WIDE}),
    "keras-one": (W.from_keras, W.to_keras, LAYERS["bare"]),
    "flax": (W.from_flax, W.to_flax, {"encoder.attention": GROUPED, "normed": NORMED}),
    "flax-one": (W.from_flax, W.to_flax, LAYERS["attention"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_there_and_back_no_bit_changes(way: str) -> None:
    of, to, layers = WAYS[way]
    ours = drawn_for(layers)
    for x in ours.values():
        x.flat[0], x.flat[-1] = -0.0, np.nan
    theirs = to(ours, layers)
    back = of(theirs, layers)
    assert list(back) == list(W.parameters_of(layers))
    for name, x in ours.items():
        assert back[name].tobytes() == x.tobytes(), name
    again = flat(to(back, layers))
    assert {name: x.tobytes() for name, x in again.items()} == {n: x.tobytes() for n, x in flat(theirs).items()}
    assert all(x.flags.c_contiguous for x in [*again.values(), *back.values()])


def test_a_strange_order_of_memory_changes_nothing(tmp_path: Any) -> None:
    """A writer of another library stores an array's memory, whatever its strides are."""
    block = LAYERS["encoder.layers.0"]
    ours = drawn_for(block)
    strange = {name: np.asfortranarray(x) if x.ndim > 1 else np.repeat(x, 2)[::2] for name, x in ours.items()}
    strange["norm1.bias"], ours["norm1.bias"] = ours["norm1.bias"][::-1], ours["norm1.bias"][::-1].copy()
    theirs = W.to_torch(strange, block)
    assert theirs["norm1.bias"].tobytes() == ours["norm1.bias"].tobytes()
    matrices = {name: x for name, x in theirs.items() if x.ndim == 2}
    safetensors.numpy.save_file(matrices, tmp_path / "block.safetensors")
    stored = safetensors.numpy.load_file(tmp_path / "block.safetensors")
    back = W.from_torch({**theirs, **stored}, block)
    for name, x in ours.items():
        np.testing.assert_array_equal(back[name], x)


def test_loading_and_reading_layers() -> None:
    layers = {"a": pa.LayerNorm(4), "b": pa.Projection(4, 3)}
    start = W.parameters_of(layers)
    given = {name: x.astype(np.float32) for name, x in drawn_for(layers).items()}
    with pytest.raises(pa.CheckpointError, match=r"weight: expected \(4, 3\) float32, got \(4, 3\) float64"):
        W.load(layers, {**given, "b.weight": given["b.weight"].astype(np.float64)})
    for name, x in W.parameters_of(layers).items():
        np.testing.assert_array_equal(x, start[name])
    W.load(layers, given)
    for name, x in W.parameters_of(layers).items():
        np.testing.assert_array_equal(x, given[name])
        assert not np.shares_memory(x, given[name])
    W.load(layers["a"], layers["a"].parameters())
    with pytest.raises(pa.CheckpointError, match=r"parameters: .* of these layers, but missing b\.bias$"):
        W.load(layers, {name: x for name, x in given.items() if name != "b.bias"})


# ---- names and shapes, as the libraries have them ------------------------------------------------------------------

TORCH_ATTENTION = {
    "in_proj_weight": (24, 8), "in_proj_bias": (24,), "out_proj.weight": (8, 8), "out_proj.bias": (8,)
}  # fmt: skip
TORCH_ENCODER_LAYER = {
    **{f"self_attn.{name}": shape for name, shape in TORCH_ATTENTION.items()},
    "linear1.weight": (12, 8), "linear1.bias": (12,), "linear2.weight": (8, 12), "linear2.bias": (8,),
    "norm1.weight": (8,), "norm1.bias": (8,), "norm2.weight": (8,), "norm2.bias": (8,),
}  # fmt: skip
KERAS = {
    "query/kernel": (8, 4, 3), "query/bias": (4, 3), "key/kernel": (8, 2, 3), "key/bias": (2, 3),
    "value/kernel": (8, 2, 3), "value/bias": (2, 3),
    "attention_output/kernel": (4, 3, 8), "attention_output/bias": (8,),
}  # fmt: skip
FLAX = {
    "query.kernel": (8, 2, 4), "key.kernel": (8, 2, 4), "value.kernel": (8, 2, 4), "out.kernel": (2, 4, 8),
    "query_ln.scale": (4,), "key_ln.scale": (4,),
}  # fmt: skip


def test_their_names_and_shapes() -> None:
    def of(layers: Any) -> Arrays:
        return drawn_for(layers)

    attention, block = LAYERS["attention"], LAYERS["encoder.layers.0"]
    assert shapes(W.to_torch(of(attention), attention)) == TORCH_ATTENTION
    assert shapes(W.to_torch(of(block), block)) == TORCH_ENCODER_LAYER
    separate = shapes(W.to_torch(of(attention), attention, packed=False))
    packed = {name: shape for name, shape in TORCH_ATTENTION.items() if name != "in_proj_weight"}
    assert separate == {**{f"{x}_proj_weight": (8, 8) for x in "qkv"}, **packed}
    several = W.to_torch(of(LAYERS), LAYERS)
    assert {"words.weight", "encoder.layers.0.self_attn.in_proj_weight", "bare.in_proj_weight"} <= set(several)
    assert several["linear.weight"].shape == (3, 8)
    assert list(shapes(W.to_keras(of(GROUPED), GROUPED)).items()) == list(KERAS.items())
    assert next(iter(W.to_keras(of({"a/b": GROUPED}), {"a/b": GROUPED}))) == "a/b/query/kernel"
    assert shapes(flat(W.to_flax(of(NORMED), NORMED))) == FLAX


# ---- what the libraries compute from arrays of these shapes --------------------------------------------------------


def weighed(q: Any, k: Any, v: Any) -> Any:
    """Return softmax(q kᵀ / √d) v for (…, n, heads, d), with grouped heads."""
    k, v = (np.repeat(x, q.shape[-2] // x.shape[-2], axis=-2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return np.einsum("bhqk,bkhd->bqhd", ref.softmax(scores), v)


def einsum_attention(x: Any, p: Arrays, out: str, sep: str) -> Any:
    """As Keras and Flax document it: the heads are an axis of the kernels."""

    def project(name: str) -> Any:
        return np.einsum("bne,ehd->bnhd", x, p[f"{name}{sep}kernel"]) + p.get(f"{name}{sep}bias", 0)

    q, k, v = (project(name) for name in ("query", "key", "value"))
    if "query_ln.scale" in p:
        q, k = (ref.layer_norm(h, p[f"{name}_ln.scale"], None, 1e-6) for name, h in (("query", q), ("key", k)))
    return np.einsum("bnhd,hde->bne", weighed(q, k, v), p[f"{out}{sep}kernel"]) + p.get(f"{out}{sep}bias", 0)


def torch_attention(x: Any, p: Arrays, heads: int = HEADS) -> Any:
    q, k, v = np.split(x @ p["in_proj_weight"].T + p["in_proj_bias"], 3, axis=-1)
    split = (h.reshape(*h.shape[:-1], heads, -1) for h in (q, k, v))
    return weighed(*split).reshape(x.shape) @ p["out_proj.weight"].T + p["out_proj.bias"]


def torch_encoder_layer(x: Any, p: Arrays) -> Any:
    of_attention = {name.removeprefix("self_attn."): a for name, a in p.items()}
    x = ref.layer_norm(x + torch_attention(x, of_attention), p["norm1.weight"], p["norm1.bias"], 1e-5)
    inner = ref.relu(x @ p["linear1.weight"].T + p["linear1.bias"])
    return ref.layer_norm(
        x + inner @ p["linear2.weight"].T + p["linear2.bias"], p["norm2.weight"], p["norm2.bias"], 1e-5
    )


def nested(arrays: Arrays) -> Arrays:
    found: Arrays = {}
    for name, x in arrays.items():
        module, key = name.split(".")
        found.setdefault(module, {})[key] = x
    return found


FORMULAS: dict[str, Any] = {
    "torch": (TORCH_ATTENTION, LAYERS["attention"], W.from_torch, torch_attention),
    "torch-encoder": (TORCH_ENCODER_LAYER, LAYERS["encoder.layers.0"], W.from_torch, torch_encoder_layer),
    "keras": (KERAS, GROUPED, W.from_keras, lambda x, p: einsum_attention(x, p, "attention_output", "/")),
    "flax": (
        FLAX, NORMED, lambda p, layer: W.from_flax(nested(p), layer), lambda x, p: einsum_attention(x, p, "out", "."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_the_layer_computes_what_theirs_does(name: str) -> None:
    theirs, layer, read, formula = FORMULAS[name]
    arrays = drawn(theirs, seed=2)
    y = layer.with_parameters(read(arrays, layer))(X)
    np.testing.assert_allclose(y, formula(X, arrays), rtol=1e-10, atol=1e-10)


# ---- what does not fit ---------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_told_at_once() -> None:
    state = drawn(TORCH_ENCODER_LAYER)
    state["linear1.weight"] = state["linear1.weight"].T
    state["self_attn.q_norm"] = state.pop("norm2.bias")
    state["norm1.weight"] = [1.0] * 8
    with pytest.raises(pa.CheckpointError) as told:
        W.from_torch(state, LAYERS["encoder.layers.0"])
    assert str(told.value) == (
        "state: expected the names and shapes that torch has for these layers, but missing norm2.bias; "
        "unexpected self_attn.q_norm; "
        "misshapen linear1.weight (expected (12, 8), got (8, 12)), norm1.weight (expected (8,), got list)"
    )
    with pytest.raises(pa.CheckpointError, match=r"weights: .*missing query/kernel, .*unexpected in_proj_bias"):
        W.from_keras(drawn(TORCH_ATTENTION), LAYERS["attention"])
    with pytest.raises(pa.CheckpointError, match=r"state: .*missing query\.kernel, .*unexpected kernel$"):
        W.from_flax({"kernel": X}, LAYERS["bare"])


@pytest.mark.parametrize("read", [W.from_torch, W.from_keras, W.from_flax])
@pytest.mark.parametrize("given", [None, [X], X])
def test_no_dict_is_told(read: Any, given: Any) -> None:
    with pytest.raises(pa.CheckpointError, match=f"expected a dict of arrays by name, got {type(given).__name__}"):
        read(given, LAYERS["attention"])


def test_parameters_of_other_layers_are_told() -> None:
    for write in (W.to_torch, W.to_keras, W.to_flax):
        with pytest.raises(pa.CheckpointError, match=r"^parameters: expected .* of these layers, but missing q_proj"):
            write(drawn_for(LAYERS["linear"]), LAYERS["attention"])


OTHERS: list[tuple[Any, Any, str]] = [
    (W.to_torch, pa.FeedForward(8, 8), "expected some of Projection, LayerNorm, .*, got a FeedForward"),
    (W.to_torch, pa.MultiHeadAttention(8, 4, 2), r"what nn\.MultiheadAttention has as well, .* with num_kv_heads=2"),
    (W.to_torch, pa.MultiHeadAttention(8, 2, rotary=True, scale=1.0), r"with scale=1\.0, rotary=\{"),
    (W.to_torch, pa.MultiHeadAttention(8, 2, sinks=True), "got a MultiHeadAttention with sinks"),
    (W.to_torch, pa.TransformerBlock(8, 2, norm="rms"), "TransformerEncoderLayer has as well, .* with norm='rms'"),
    (W.to_torch, pa.TransformerBlock(8, 2, activation="swiglu"), r"with feed_forward\.gate_proj\.bias, feed_forward"),
    (W.to_keras, pa.MultiHeadAttention(8, 2, scale="model"), r"Keras's MultiHeadAttention .* with scale='model'"),
    (W.to_keras, pa.MultiHeadAttention(8, 4, 2, value_dim=3), "GroupQueryAttention .* with value_dim=3"),
    (W.to_keras, pa.MultiHeadAttention(8, 2, qk_norm="rms"), r"with k_norm\.weight, q_norm\.weight"),
    (W.to_keras, pa.LayerNorm(8), "expected MultiHeadAttention, got a LayerNorm"),
    (W.to_flax, pa.TransformerBlock(8, 2), "expected MultiHeadAttention, got a TransformerBlock"),
    (W.to_flax, pa.MultiHeadAttention(8, 2, qk_norm="rms"), r"nnx\.MultiHeadAttention .* with qk_norm='rms'"),
    (W.to_flax, pa.MultiHeadAttention(8, 2, value_dim=3), r"with value_dim=3"),
]  # fmt: skip


@pytest.mark.parametrize(("write", "layer", "told"), OTHERS, ids=lambda value: getattr(value, "__name__", ""))
def test_layers_without_a_counterpart_are_refused(write: Any, layer: Any, told: str) -> None:
    with pytest.raises(pa.ArgumentError, match=told):
        write(layer.parameters(), layer)


@pytest.mark.parametrize("layers", [None, {"a": 1}, [pa.LayerNorm(3)]])
def test_no_layers_are_told(layers: Any) -> None:
    with pytest.raises(pa.ArgumentError, match="layers: expected a layer of polyattn, or a dict of layers by name"):
        W.parameters_of(layers)
