"""Reports of attention's masks: causal, windows, padding and packed sequences. docs/field.md has the links."""

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(140)

# Each way of calling attention that lost its causal mask somewhere.
CAUSAL = {
    "xformers-103": lambda make, q, k, v: pa.attention(q, k, v, causal=True),
    "keras-23038": lambda make, q, k, v: pa.attention(q, k, v, causal=True, dropout=0.5, seed=7),
    "transformers-30652": lambda make, q, k, v: pa.attention_weights(q, k, causal=True),
    "transformers-48748": lambda make, q, k, v: pa.attention(
        q, k, v, causal=True, mask=make(np.ones((5, 5)), "bool"), bias=make(np.zeros((2, 5, 5)))
    ),
}


@pytest.mark.parametrize("report", CAUSAL)
def test_the_future_reaches_nothing(report, make, to_np):
    """Another last key and value change the last row alone."""
    q, k, v = RNG.standard_normal((3, 2, 5, 4))
    other_k, other_v = k.copy(), v.copy()
    other_k[:, -1], other_v[:, -1] = 30.0, -40.0
    before = to_np(CAUSAL[report](make, make(q), make(k), make(v)))
    after = to_np(CAUSAL[report](make, make(q), make(other_k), make(other_v)))
    assert_close(after[:, :-1], before[:, :-1])
    assert np.abs(after[:, -1] - before[:, -1]).max() > 0.1


# Arguments, (n_q, n_k), and the number of keys that each query sees.
WINDOWS = {
    "jax-32300": ({"window": (0, 1)}, (6, 6), [2, 2, 2, 2, 2, 1]),
    "flash-attention-1133": ({"window": (5, 0)}, (6, 6), [1, 2, 3, 4, 5, 6]),
    "flash-attention-2574": ({"window": (None, 0)}, (6, 6), [1, 2, 3, 4, 5, 6]),
    "flash-attention-2199": ({"window": (1, 2)}, (6, 3), [0, 1, 2, 3, 3, 2]),
    "mlx-lm-390": ({"window": (3, 0), "causal": True}, (6, 6), [1, 2, 3, 4, 4, 4]),
}


@pytest.mark.parametrize("report", WINDOWS)
def test_windows(report, agrees):
    """Zero queries and values of one: a row of results has the weight 1 / count at each key that it sees."""
    arguments, (n_q, n_k), counts = WINDOWS[report]
    out = agrees(np.zeros((1, n_q, 2)), np.zeros((1, n_k, 2)), np.eye(n_k)[None], **arguments).out[0]
    np.testing.assert_array_equal((out > 0).sum(axis=1), counts)
    np.testing.assert_allclose(out[out > 0], np.repeat(1 / np.maximum(counts, 1), counts), rtol=1e-12)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (None, -3)], ids=str)
def test_flash_attention_1116_windows_below_zero(window, make):
    """None is unbounded; a number below 0 is refused, not taken for that."""
    x = make(np.zeros((1, 4, 2)))
    with pytest.raises(pa.ArgumentError, match="window"):
        pa.attention(x, x, x, window=window)


TRIANGLE = np.tri(3, dtype=bool)

# Blocks, their sizes, (heads, n_q, n_k), and further arguments.
BLOCKS = {
    "pytorch-153799": (TRIANGLE, (4, 4), (1, 9, 9), {"causal": True, "bias": np.subtract.outer(*[np.arange(9.0)] * 2)}),
    "pytorch-141126": (np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool), (4, 4), (1, 16, 16), {}),
    "pytorch-136657": (np.array([[True, False], [True, True]]), (2, 3), (1, 4, 6), {}),
    "pytorch-148527": (np.stack([TRIANGLE, TRIANGLE.T, ~TRIANGLE]), (2, 2), (3, 6, 6), {}),
    "pytorch-139462": (np.array([[True]]), (128, 128), (1, 2, 2), {"causal": True}),
}


@pytest.mark.parametrize("report", BLOCKS)
def test_block_masks(report, agrees):
    """Two items with a mask of blocks: as with the mask written out."""
    blocks, (rows, columns), (heads, n_q, n_k), arguments = BLOCKS[report]
    dense = np.repeat(np.repeat(blocks, rows, axis=-2), columns, axis=-1)[..., :n_q, :n_k]
    q, (k, v) = RNG.standard_normal((2, heads, n_q, 4)), RNG.standard_normal((2, 2, heads, n_k, 4))
    agrees(q, k, v, mask=dense, instead={"mask": pa.block_mask(blocks, (rows, columns))}, **arguments)


def test_pytorch_136232_a_block_mask_of_a_longer_sequence(make):
    """Blocks for 16 keys do not serve for 9: an error at the call, and no gradient of NaN."""
    mask, x = pa.block_mask(np.tri(4, dtype=bool), 4), make(np.zeros((1, 9, 4)))
    with pytest.raises(pa.ShapeError, match="mask"):
        pa.attention_forward(x, x, x, mask=mask)


def test_onnxruntime_14363_padding_and_causal(agrees):
    """Excluded scores of ±20,000 beside visible ones of the same size: no finite penalty would exclude them."""
    padding = np.array([False, True, True, False, False, True, False])
    q, k = 75 * RNG.standard_normal((2, 1, 7, 4))
    out = agrees(q, k, RNG.standard_normal((1, 7, 3)), mask=padding, causal=True, scale=1.0).out
    assert not out[0, 0].any()


NOTHING = {
    "mask": np.array([[True, True, True], [False, False, False]]),
    "bias": np.array([[0.0, 0.0, 0.0], [-np.inf, -np.inf, -np.inf]]),
    "key_lengths": np.array([3, 0]),
    "segment_ids": (np.array([0, 1]), np.array([0, 0, 0])),
}


@pytest.mark.parametrize("argument", NOTHING)
def test_keras_21149_weights_of_nothing(argument, make, to_np, agrees):
    """A row that excludes every key has weights and gradients of zero, not a third each, however it is excluded."""
    q, k, v = RNG.standard_normal((3, 2, 1, 3, 4))
    given = NOTHING[argument]
    agrees(q[:, :, :2], k, v, **{argument: given})
    kind = {"bias": "float64", "mask": "bool"}.get(argument, "int32")
    native = tuple(make(ids, kind) for ids in given) if isinstance(given, tuple) else make(given, kind)
    weights = to_np(pa.attention_weights(make(q[:, :, :2]), make(k), **{argument: native}))
    rows = (weights[1], weights[0]) if argument == "key_lengths" else (weights[:, :, 1], weights[:, :, 0])
    assert not rows[0].any()
    assert_close(rows[1].sum(axis=-1), np.ones(rows[1].shape[:-1]))


def test_transformers_29029_left_padding(make, to_np):
    """A sequence padded on the left, its rotary positions counted from its first token, equals it without padding."""
    q, k, v = RNG.standard_normal((3, 2, 7, 4))
    k[:, :3], v[:, :3] = 50.0, -50.0
    positions = make([0, 0, 0, 0, 1, 2, 3], "int32")
    turned = [pa.functional.rotary_embedding(make(x), positions=positions) for x in (q, k)]
    padded = pa.attention(*turned, make(v), causal=True, mask=make(np.arange(7) >= 3, "bool"))
    alone = ref.attention(*(ref.rotary_embedding(x[:, 3:]) for x in (q, k)), v[:, 3:], causal=True)
    assert_close(to_np(padded)[:, 3:], alone.out)


def test_xformers_722_documents_by_a_mask(agrees):
    """Three documents in one row, by a mask: each as by itself."""
    ids = np.array([0, 0, 0, 1, 1, 2])
    q, k, v = RNG.standard_normal((3, 2, 6, 4))
    out = agrees(q, k, v, mask=ids[:, None] == ids, causal=True).out
    for document in range(3):
        there = ids == document
        alone = ref.attention(q[:, there], k[:, there], v[:, there], causal=True).out
        assert_close(out[:, there], alone)


def test_flash_attention_443_many_queries_and_one_key(dtypes, agrees):
    """Segments with one key each: the result is its value, and no query has a gradient."""
    of_query = np.repeat([0, 1, 2], [4, 3, 5])
    q, (k, v) = 3 * RNG.standard_normal((1, 12, 8)), 3 * RNG.standard_normal((2, 1, 3, 8))
    for dtype in dtypes:
        out, grads = agrees(q, k, v, dtype, segment_ids=(of_query, np.arange(3)))
        np.testing.assert_array_equal(out, out[:, [0, 0, 0, 0, 4, 4, 4, 7, 7, 7, 7, 7]])
        assert np.abs(grads.q).max() <= 1e-5


def test_pytorch_27968_items_of_all_lengths(contract, make, to_np):
    """Lengths 5, 3, 1 and 0 in a layer: weights of every row sum to 1, of the empty item to 0."""
    place = {"backend": contract.name, "device": contract.device_of(make([0.0]))}
    layer = pa.MultiHeadAttention(8, num_heads=2, dtype="float64", **place)
    bias = RNG.standard_normal(8)
    layer = layer.with_parameters({**layer.parameters(), "out_proj.bias": make(bias)})
    x, lengths = make(RNG.standard_normal((4, 5, 8))), make([5, 3, 1, 0], "int32")
    weights = to_np(layer.attention_weights(x, key_lengths=lengths))
    assert_close(weights.sum(axis=-1), np.ones((4, 2, 5)) * np.array([1, 1, 1, 0])[:, None, None])
    assert not weights[1, ..., 3:].any()
    y = to_np(layer(x, key_lengths=lengths, dropout=0.1, seed=3))
    assert_close(y[3], np.broadcast_to(bias, (5, 8)))
    assert np.isfinite(y).all()


def test_tensorflow_58322_one_position_of_one_feature(contract, make, to_np):
    """The causal softmax over one key is 1, not a softmax over no axis."""
    place = {"backend": contract.name, "device": contract.device_of(make([0.0]))}
    layer = pa.MultiHeadAttention(1, num_heads=1, bias=False, dtype="float64", **place)
    value, out = (to_np(layer.parameters()[f"{name}_proj.weight"]) for name in ("v", "out"))
    y, cache = layer.forward(make([[[2.0]]]), causal=True)
    assert_close(to_np(y), 2.0 * value @ out[None])
    inputs, _ = layer.backward(make([[[1.0]]]), cache)
    assert_close(to_np(inputs.query), value @ out[None])


def test_tensorflow_60626_layers_of_more_axes(contract, make, to_np):
    """Two batch axes and a padding mask: as each entry by itself."""
    place = {"backend": contract.name, "device": contract.device_of(make([0.0]))}
    layer = pa.MultiHeadAttention(8, num_heads=2, dtype="float64", **place)
    x, mask = RNG.standard_normal((2, 3, 4, 8)), RNG.random((2, 3, 1, 1, 4)) < 0.6
    y = to_np(layer(make(x), mask=make(mask, "bool")))
    for entry in np.ndindex(2, 3):
        assert_close(y[entry], to_np(layer(make(x[entry]), mask=make(mask[entry], "bool"))))


def test_flash_attention_978_the_log_sum_exp_without_keys(make, to_np):
    """It is −∞ where there is no key, not +∞, so that a merge gives that part no weight."""
    q, k, v = (make(x) for x in (np.ones((1, 2, 4)), np.ones((1, 0, 4)), np.ones((1, 0, 3))))
    out, cache = pa.attention_forward(q, k, v)
    np.testing.assert_array_equal(to_np(cache.lse), np.full((1, 2), -np.inf))
    np.testing.assert_array_equal(to_np(out), np.zeros((1, 2, 3)))


def test_vllm_28181_a_merge_of_empty_parts(make, to_np):
    """Two parts without keys are such a part; beside one with keys they change nothing."""
    empty = (make(np.zeros((1, 2, 3))), make(np.full((1, 2), -np.inf)))
    out, lse = pa.attention_merge([empty, empty])
    np.testing.assert_array_equal(to_np(out), np.zeros((1, 2, 3)))
    np.testing.assert_array_equal(to_np(lse), np.full((1, 2), -np.inf))
    part = RNG.standard_normal((1, 2, 3)), np.array([[0.5, -700.0]])
    out, lse = pa.attention_merge([empty, tuple(map(make, part)), empty])
    assert_close(to_np(out), part[0])
    assert_close(to_np(lse), part[1])


def test_jax_6811_the_log_sum_exp_of_nothing(make, to_np):
    """An upstream gradient of the log-sum-exp of an empty row, −∞, reaches nothing."""
    q, k, v = (make(x) for x in RNG.standard_normal((3, 1, 2, 4)))
    _, cache = pa.attention_forward(q, k, v, mask=make([[True, True], [False, False]], "bool"))
    assert to_np(cache.lse)[0, 1] == -np.inf
    grads = pa.attention_backward(make(np.zeros((1, 2, 4))), cache, dlse=make([[0.0, 1.0]]))
    for gradient in (grads.q, grads.k, grads.v):
        np.testing.assert_array_equal(to_np(gradient), np.zeros((1, 2, 4)))
