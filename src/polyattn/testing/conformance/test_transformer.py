"""Options of the layers for transformers: rotary, query-key norms, sinks, windows; blocks; decoding.

Values are compared with independent formulas, gradients with central differences of those.
"""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.backend import dtype_name
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(61)
X, CONTEXT, DY = (RNG.standard_normal((2, n, 8)) for n in (5, 7, 5))
IDS, KEY_IDS = RNG.integers(0, 90, (2, 5)), RNG.integers(0, 90, (7,))

# Options of the attention layer, 4 heads of width 4 in a model of width 8, and those of the reference.
ALL: dict[str, Any] = {
    "num_kv_heads": 2, "rotary": {"base": 50.0}, "qk_norm": "rms", "sinks": True, "window": (2, None), "bias": False,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "rotary": {"rotary": True},
    "partial": {"rotary": {"dim": 2, "interleaved": True, "base": 20.0}, "qk_norm": "layer"},
    "scaled": {"rotary": {"scaling": F.YaRNScaling(4.0, 16)}, "sinks": True},
    "rms": {"qk_norm": "rms", "qk_norm_eps": 1e-2, "window": (1, 1)},
    "all": ALL,
}
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 16}


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the reference."""
    rotary = options.get("rotary")
    rotary = {} if rotary is True else rotary
    if rotary is not None and "scaling" in rotary:
        rotary = {**rotary, "scaling": YARN}
    said: dict[str, Any] = {name: options[name] for name in ("num_kv_heads", "qk_norm", "window") if name in options}
    return {**said, "num_heads": 4, "rotary": rotary, "eps": options.get("qk_norm_eps", 1e-6)}


def block_known(options: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = {name: options[name] for name in ("norm_first", "norm", "activation") if name in options}
    return {**{name: x for name, x in known(options).items() if name != "eps"}, **said}


@pytest.fixture
def build(contract: Any, backend: Any, target: Any, to_np: Any) -> Any:
    """Return ``build(kind, **options)``: a layer with changed parameters, and the parameters."""

    def build(kind: Any, dtype: Any = "float64", **options: Any) -> Any:
        if kind is pa.MultiHeadAttention:
            options = {"head_dim": 4, **options}
        else:
            options = {"hidden": 12, "head_dim": 4, **options}
        layer = kind(8, 4, dtype=dtype, backend=backend, device=target.device, seed=3, **options)
        rng = np.random.default_rng(4)
        hosts = {name: to_np(p) + 0.3 * rng.standard_normal(p.shape) for name, p in layer.parameters().items()}
        layer = layer.with_parameters({n: target.make(p, dtype) for n, p in hosts.items()})
        return layer, {name: to_np(p).astype(np.float64) for name, p in layer.parameters().items()}

    return build


def native(make: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert NumPy arrays, and pairs of them, to arrays of the library."""

    def moved(x: Any) -> Any:
        if isinstance(x, tuple) and isinstance(x[0], np.ndarray):
            return tuple(moved(part) for part in x)
        return make(x, "int32" if x.dtype.kind == "i" else str(x.dtype)) if isinstance(x, np.ndarray) else x

    return {name: moved(x) for name, x in arguments.items()}


def gradients_agree(value: Any, inputs: Any, parameters: Any, dinputs: Any, grads: Any, to_np: Any) -> None:
    """Compare with central differences of ``value(*inputs, parameters)``, a formula in float64."""
    assert list(grads) == list(parameters)

    def loss(*arrays: Any) -> float:
        held = dict(zip(parameters, arrays[len(inputs) :], strict=True))
        return float(np.sum(value(*arrays[: len(inputs)], held) * DY))

    # Softmax is invariant to a term common to all keys: its gradient is zero except for rounding errors.
    zero = [name for name in parameters if name.endswith("k_proj.bias") and np.max(np.abs(to_np(grads[name]))) < 1e-12]
    moving = [name for name in parameters if name not in zero]
    slopes_agree(
        lambda *arrays: loss(
            *arrays[: len(inputs)],
            *({**parameters, **dict(zip(moving, arrays[len(inputs) :], strict=True))}[name] for name in parameters),
        ),
        [*inputs, *(parameters[name] for name in moving)],
        [*(to_np(dx) for dx in dinputs), *(to_np(grads[name]) for name in moving)],
    )


# ---- the attention layer -------------------------------------------------------------------------------------------


def attention_agrees(build: Any, make: Any, to_np: Any, options: Any, inputs: Any, arguments: Any, said: Any) -> None:
    layer, parameters = build(pa.MultiHeadAttention, **options)
    given, more = [make(x) for x in inputs], native(make, arguments)
    y, cache = layer.forward(*given, **more)
    back, grads = layer.backward(make(DY), cache)

    def value(*arrays: Any) -> Any:
        *xs, held = arrays
        return ref.transformer_attention(held, xs[0], xs[-1], **{**known(options), **said})

    assert_close(to_np(y), value(*inputs, parameters))
    assert_close(to_np(layer(*given, **more)), to_np(y))
    gradients_agree(value, inputs, parameters, back[: len(inputs)], grads, to_np)
    assert back[len(inputs) :] == (None,) * (5 - len(inputs))
    none, same = layer.backward(make(DY), cache, inputs=False)
    assert none[:3] == (None, None, None)
    for name, gradient in same.items():
        np.testing.assert_array_equal(to_np(gradient), to_np(grads[name]))


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_options(build: Any, make: Any, to_np: Any, name: Any) -> None:
    attention_agrees(build, make, to_np, OPTIONS[name], [X], {"causal": True}, {"causal": True})


# Arguments of a call, and those of the reference if they differ.
CALLS: dict[str, Any] = {
    "last-of-the-keys": ([X, CONTEXT], {"causal": True}, {}),
    "offset": ([X, CONTEXT], {"causal": True, "q_offset": 1}, {}),
    "offset-each": ([X, CONTEXT], {"causal": True, "q_offset": np.array([1, 3])}, {}),
    "positions": ([X], {"positions": IDS, "window": (0, 1)}, {"positions": (IDS, IDS)}),
    "positions-both": ([X, CONTEXT], {"positions": (IDS, KEY_IDS), "key_lengths": np.array([4, 7])}, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_attention_calls(build: Any, make: Any, to_np: Any, name: Any) -> None:
    inputs, arguments, said = CALLS[name]
    attention_agrees(build, make, to_np, ALL, inputs, arguments, {**arguments, **said})


def test_attention_weights_are_those_of_the_layer(build: Any, make: Any, to_np: Any) -> None:
    layer, parameters = build(pa.MultiHeadAttention, **ALL)
    arguments = {"q_offset": np.array([1, 3]), "causal": True}
    weights = to_np(layer.attention_weights(make(X), make(CONTEXT), **native(make, arguments)))
    value = (CONTEXT @ parameters["v_proj.weight"]).reshape(2, 7, 2, 4).swapaxes(1, 2).repeat(2, axis=1)
    joined = (weights @ value).swapaxes(1, 2).reshape(2, 5, 16)
    assert_close(
        joined @ parameters["out_proj.weight"], to_np(layer(make(X), make(CONTEXT), **native(make, arguments)))
    )
    assert np.all(weights.sum(-1) < 1)


def test_options_leave_the_other_parameters_as_they_are(contract: Any, backend: Any, to_np: Any, tmp_path: Any) -> None:
    plain = pa.MultiHeadAttention(8, 2, backend=backend, seed=7)
    more = pa.MultiHeadAttention(8, 2, rotary=True, qk_norm="rms", sinks=True, backend=backend, seed=7)
    assert list(more.parameters()) == [*plain.parameters(), "q_norm.weight", "k_norm.weight", "sinks"]
    for name, parameter in plain.parameters().items():
        np.testing.assert_array_equal(to_np(more.parameters()[name]), to_np(parameter))
    with_rotary = pa.MultiHeadAttention(8, 2, rotary={"base": 500.0}, window=(3, 0), backend=backend)
    plain.save(tmp_path / "layer.safetensors")
    with_rotary.load(tmp_path / "layer.safetensors")
    for layer in (plain, more, with_rotary):
        assert type(layer)(**layer.config()).config() == layer.config()


# ---- the block -----------------------------------------------------------------------------------------------------

BLOCKS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_first": False, "activation": "geglu"},
    "post-rms": {"norm_first": False, "norm": "rms", "activation": "relu", **ALL, "bias": True},
    "pre-rms": {"norm": "rms", "activation": "swiglu", **ALL},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block(build: Any, make: Any, to_np: Any, name: Any) -> None:
    options = BLOCKS[name]
    layer, parameters = build(pa.TransformerBlock, **options)
    y, cache = layer.forward(make(X), causal=True)
    back, grads = layer.backward(make(DY), cache)

    def value(x: Any, held: Any) -> Any:
        return ref.transformer_block(held, x, causal=True, **block_known(options))

    assert_close(to_np(y), value(X, parameters))
    assert_close(to_np(layer(make(X), causal=True)), to_np(y))
    gradients_agree(value, [X], parameters, [back.x], grads, to_np)
    none, same = layer.backward(make(DY), cache, inputs=False)
    assert none == (None, None, None)
    for name, gradient in same.items():
        np.testing.assert_array_equal(to_np(gradient), to_np(grads[name]))
    assert type(layer)(**layer.config()).config() == layer.config()


BLOCK_CALLS: dict[str, dict[str, Any]] = {
    "mask": {"mask": RNG.random((2, 1, 5, 5)) < 0.7, "key_lengths": np.array([3, 5])},
    "segments": {
        "segment_ids": (np.array([0, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 1])), "softcap": 3.0, "window": (None, 0),
    },
    "bias": {"bias": RNG.standard_normal((4, 5, 1)), "sinks": RNG.standard_normal(4), "positions": IDS},
    "dropout": {"dropout": 0.4, "seed": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCK_CALLS)
def test_block_takes_attention_s_arguments(build: Any, make: Any, to_np: Any, name: Any) -> None:
    """Values are compared with the reference, gradients with those on NumPy, which are checked above."""
    options, arguments = {"rotary": True, "qk_norm": "rms"}, BLOCK_CALLS[name]
    layer, parameters = build(pa.TransformerBlock, **options)
    y, cache = layer.forward(make(X), **native(make, arguments))
    back, grads = layer.backward(make(DY), cache)
    if name != "dropout":
        said = {**arguments, "positions": (IDS, IDS)} if "positions" in arguments else arguments
        assert_close(to_np(y), ref.transformer_block(parameters, X, **{**block_known(options), **said}))
    there = layer.to("numpy")
    want_y, there_cache = there.forward(X, **arguments)
    want, want_grads = there.backward(DY, there_cache)
    assert_close(to_np(y), want_y)
    for field, got, expected in zip(back._fields, back, want, strict=True):
        assert (got is None) == (expected is None) == (field != "x" and name != "bias"), field
        if got is not None:
            assert_close(to_np(got), expected, what=field)
    for key, gradient in grads.items():
        scale = 1.0 if key.endswith("k_proj.bias") else None
        assert_close(to_np(gradient), want_grads[key], scale=scale, what=key)


def test_block_in_the_narrowest_dtype(contract: Any, build: Any, make: Any, to_np: Any, dtypes: Any) -> None:
    """All intermediate arrays are rounded to the dtype: the tolerance is a few times that of one operation."""
    dtype = next(name for name in ("bfloat16", "float16", "float32", "float64") if name in dtypes)
    options = BLOCKS["pre-rms"]
    layer, parameters = build(pa.TransformerBlock, dtype, **options)
    x, dy = make(X, dtype), make(DY, dtype)

    def step(held: Any, x: Any, dy: Any) -> Any:
        y, cache = layer.with_parameters(held).forward(x, causal=True)
        back, grads = layer.backward(dy, cache)
        return y, back.x, grads

    y, dx, grads = contract.jit(step)(layer.parameters(), x, dy)
    exact = pa.TransformerBlock(**layer.config(), dtype="float64", backend="numpy").with_parameters(parameters)
    want_y, there = exact.forward(to_np(x).astype(np.float64), causal=True)
    want, want_grads = exact.backward(to_np(dy).astype(np.float64), there)
    results = {"y": (y, want_y), "x": (dx, want.x), **{name: (grads[name], want_grads[name]) for name in grads}}
    for name, (got, expected) in results.items():
        assert dtype_name(got.dtype) == dtype
        scale = 6 * float(np.max(np.abs(expected)))
        assert_close(to_np(got), expected, dtype, scale=scale, what=name)


def test_block_is_taken_over_whole(build: Any, make: Any, to_np: Any, backend: Any, tmp_path: Any) -> None:
    layer, _ = build(pa.TransformerBlock, **BLOCKS["pre-rms"])
    want = to_np(layer(make(X)))
    layer.save(tmp_path / "block.safetensors")
    other = pa.TransformerBlock(**layer.config(), dtype="float64", backend=backend, seed=9)
    assert not np.array_equal(to_np(other(make(X))), want)
    other.load(tmp_path / "block.safetensors")
    for same in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(to_np(same(make(X))), want)
    assert_close(layer.to("numpy")(X), want)


def test_block_starts_the_same_everywhere(contract: Any, backend: Any, to_np: Any) -> None:
    here, there = (pa.TransformerBlock(8, 2, seed=5, backend=place).parameters() for place in (backend, "numpy"))
    assert list(here) == list(there)
    for name, parameter in here.items():
        np.testing.assert_array_equal(to_np(parameter), there[name])
    weights = there["attention.q_proj.weight"], there["feed_forward.up_proj.weight"][:, :8]
    assert (weights[0] != weights[1]).all(), "the parts draw from one stream, one after the other"


def test_block_compiled(contract: Any, build: Any, make: Any, to_np: Any) -> None:
    """Forward and backward in one compiled function of the parameters, the input and its position."""
    layer, parameters = build(pa.TransformerBlock, **BLOCKS["pre-rms"])

    def step(held: Any, x: Any, dy: Any, offset: Any) -> Any:
        y, cache = layer.with_parameters(held).forward(x, causal=True, q_offset=offset)
        back, grads = layer.backward(dy, cache)
        return y, back.x, grads

    y, dx, grads = contract.jit(step)(layer.parameters(), make(X), make(DY), make(1, "int32"))
    there = layer.to("numpy")
    want_y, cache = there.forward(X, causal=True, q_offset=1)
    want, want_grads = there.backward(DY, cache)
    assert_close(to_np(y), want_y)
    assert_close(to_np(dx), want.x)
    for name in parameters:
        assert_close(to_np(grads[name]), want_grads[name], what=name)


# ---- decoding ------------------------------------------------------------------------------------------------------

CACHES: dict[str, Any] = {
    "fixed": lambda **where: pa.KVCache.create(2, 2, 9, 4, **where),
    "paged": lambda **where: pa.PagedKVCache.create(2, 2, pages=8, page_size=2, head_dim=4, **where),
    "sliding": lambda **where: pa.SlidingKVCache.create(2, 2, 3, 4, chunk=2, **where),
}


@pytest.mark.parametrize(
    ("layer", "kind"),
    [(pa.MultiHeadAttention, "paged"), (pa.TransformerBlock, "sliding")],
)
def test_decoding_equals_the_whole(build: Any, make: Any, to_np: Any, target: Any, layer: Any, kind: Any) -> None:
    """Two positions at a time and token by token, with rotary, norms, sinks and a window."""
    layer, _ = build(layer, **ALL)
    want = to_np(layer(make(X), causal=True))
    cache = CACHES[kind](dtype="float64", backend=target.name, device=target.device)
    for start, end in ((0, 2), (2, 3), (3, 4), (4, 5)):
        y, cache = layer.decode(make(X[:, start:end]), cache)
        assert_close(to_np(y), want[:, start:end], what=f"positions from {start}")
    assert cache.position == 5


def test_decoding_after_prompts_of_different_lengths(build: Any, make: Any, to_np: Any, target: Any) -> None:
    """Each entry continues at its own position; scores are scaled by the model's width, and capped."""
    layer, parameters = build(pa.MultiHeadAttention, **ALL, scale="model")
    cache = CACHES["fixed"](dtype="float64", backend=target.name, device=target.device)
    _, cache = layer.decode(make(CONTEXT[:, :2]), cache)
    cache = cache.rewind(make(np.array([0, 1]), "int32"))
    y, _ = layer.decode(make(X[:, :1]), cache, softcap=0.5)
    said = {**known(ALL), "causal": True, "scale": 8**-0.5, "softcap": 0.5}
    for entry, length in enumerate((2, 1)):
        text = np.concatenate([CONTEXT[entry, :length], X[entry, :1]])
        assert_close(to_np(y)[entry], ref.transformer_attention(parameters, text, text, **said)[-1:])


def test_decoding_compiled(contract: Any, build: Any, make: Any, to_np: Any, target: Any) -> None:
    """One compilation of the step for all positions."""
    layer, _ = build(pa.TransformerBlock, **ALL)
    want = to_np(layer(make(X), causal=True))
    cache = CACHES["fixed"](dtype="float64", backend=target.name, device=target.device)
    step = contract.jit(lambda held, x, cache: layer.with_parameters(held).decode(x, cache))
    for i in range(5):
        y, cache = step(layer.parameters(), make(X[:, i : i + 1]), cache)
        assert_close(to_np(y), want[:, i : i + 1])


# ---- bad input -----------------------------------------------------------------------------------------------------

BAD_OPTIONS: dict[str, Any] = {
    "rotary": ({"rotary": {"theta": 3.0}}, pa.ArgumentError, "rotary: expected True, or a dict with some of base"),
    "rotary-dim": ({"rotary": {"dim": 5}}, pa.ShapeError, "dim: .*even"),
    "rotary-odd": ({"rotary": True, "head_dim": 3}, pa.ShapeError, "head_dim: .*even"),
    "qk-norm": ({"qk_norm": "batch"}, pa.ArgumentError, "qk_norm: expected one of layer, rms, got 'batch'"),
    "qk-norm-eps": ({"qk_norm_eps": -1}, pa.ArgumentError, "eps: "),
    "window": ({"window": (-1, 0)}, pa.ArgumentError, "window: "),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(build: Any, name: Any) -> None:
    options, error, words = BAD_OPTIONS[name]
    for kind in (pa.MultiHeadAttention, pa.TransformerBlock):
        with pytest.raises(error, match=words):
            build(kind, **options)


def test_bad_calls(build: Any, make: Any, backend: Any, target: Any) -> None:
    block, _ = build(pa.TransformerBlock, **ALL)
    layer, _ = build(pa.MultiHeadAttention, **ALL)
    plain, _ = build(pa.MultiHeadAttention)
    x, context, ids = make(X), make(CONTEXT), make(IDS, "int32")
    wrong: list[tuple[Any, Any, str]] = [
        (lambda: plain(x, positions=ids), pa.ArgumentError, "positions: .*no rotary"),
        (lambda: layer(x, context, positions=ids), pa.ArgumentError, "positions: expected a pair"),
        (lambda: layer(x, positions=make(IDS[:, :4], "int32")), pa.ShapeError, "positions: .*5 rows"),
        (lambda: layer(x, positions=make(X[..., 0])), pa.DTypeError, "positions: expected integers"),
        (lambda: layer(x, sinks=make(X[0, 0, :4])), TypeError, "no argument 'sinks'"),
        (lambda: layer(make(X[:1]), context, q_offset=make([1, 2], "int32")), pa.ShapeError, "q_offset: "),
        (lambda: block(make(X[0, 0])), pa.ShapeError, "x: .*2 axes"),
        (lambda: block(make(X[..., :4])), pa.ShapeError, r"x: expected \(…, 8\)"),
        (lambda: block(x, dance=True), TypeError, "no argument 'dance'"),
        (lambda: block.decode(x, None), pa.ArgumentError, "cache: expected a KVCache"),
        (lambda: pa.TransformerBlock(8, 4, norm="batch"), pa.ArgumentError, "norm: expected one of layer, rms"),
        (lambda: pa.TransformerBlock(8, 4, hidden=0), pa.ShapeError, "hidden: expected a positive integer"),
    ]
    for call, error, words in wrong:
        with pytest.raises(error, match=words):
            call()
    where = {"dtype": "float64", "backend": target.name, "device": target.device}
    cache = CACHES["fixed"](**where)
    with pytest.raises(TypeError, match="no argument 'q_offset'"):
        layer.decode(x, cache, q_offset=1)
    with pytest.raises(pa.ArgumentError, match=r"cache: .*window \(2, None\), got 5"):
        layer.decode(x, pa.SlidingKVCache.create(2, 2, 5, 4, **where))
    assert cache.position == 0, "a call that is refused consumes no cache"
