"""Cases that ONNX's node tests lack: older opsets, the backend that computes, and errors."""

import numpy as np
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator

import polyattn as pa
from polyattn.interop.onnx import operators
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(23)


def run(text, inputs, backend, opset=24):
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    names = [value.name for value in model.graph.input]
    return ReferenceEvaluator(model, new_ops=operators(backend)).run(None, dict(zip(names, inputs, strict=True)))


@pytest.mark.parametrize(("attribute", "axis"), [("", 1), ("<axis=2>", 2), ("<axis=-2>", -2), ("<axis=0>", 0)])
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_a_softmax_before_opset_13_is_over_all_axes_from_one_on(name, attribute, axis, backend):
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    (y,) = run(f"g (float[2,3,4] x) => (float[2,3,4] y) {{ y = {name} {attribute} (x) }}", [x], backend, opset=12)
    want = ref.softmax(x.reshape(*x.shape[:axis], -1)).reshape(x.shape)
    assert_close(np.exp(y) if name == "LogSoftmax" else y, want, "float32")


def test_a_selection_counts_where_none_was_given(backend):
    x = RNG.standard_normal((2, 4)).astype(np.float32)
    text = "g (float[2,4] x) => (float[2,4] y) { y = Gelu (x) }"
    with pa.use_backend(backend), pa.transfers() as account:
        (y,) = run(text, [x], None)
    assert (account.count > 0) == (backend != "numpy")
    assert_close(y, ref.gelu(x), "float32")


def test_a_model_goes_on_beside_other_operators(backend):
    """Two operators of ours and one of the evaluator: a pre-norm residual block."""
    x = RNG.standard_normal((1, 5, 6)).astype(np.float32)
    text = """g (float[1,5,6] x, float[6] w) => (float[1,5,6] y) {
        h = LayerNormalization (x, w)
        a = Attention <q_num_heads=2, kv_num_heads=2, is_causal=1> (h, h, h)
        y = Add (x, a)
    }"""
    weight = RNG.standard_normal(6).astype(np.float32)
    (y,) = run(text, [x, weight], backend)
    heads = ref.layer_norm(x, weight).reshape(1, 5, 2, 3).swapaxes(1, 2)
    want = x + ref.attention(heads, heads, heads, causal=True).out.swapaxes(1, 2).reshape(x.shape)
    assert_close(y, want, "float32")


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_scores_of_grouped_heads_in_every_mode(mode, backend):
    """With a float mask that is shorter than the keys, lengths and a window."""
    q, k = RNG.standard_normal((2, 4, 3, 8)), RNG.standard_normal((2, 2, 6, 8))
    mask, lengths = RNG.standard_normal((3, 5)), np.array([5, 4])
    mask[1] = -np.inf
    text = f"""g (double[2,4,3,8] q, double[2,2,6,8] k, double[3,5] mask, int64[2] lengths)
        => (double[2,4,3,8] y, double[2,4,3,6] scores) {{
        y, , , scores = Attention <is_causal=1, softcap=2.0, scale=0.5, qk_matmul_output_mode={mode}>
            (q, k, k, mask, , , lengths)
    }}"""
    _, scores = run(text, [q, k, mask, lengths], backend)
    raw = 0.5 * np.einsum("bhqd,bhkd->bhqk", q, k.repeat(2, axis=1))
    capped, bias = 2 * np.tanh(raw / 2), np.pad(mask, [(0, 0), (0, 1)], constant_values=-np.inf)
    arguments = {"bias": bias, "causal": True, "q_offset": lengths - 3, "key_lengths": lengths}
    with_bias = np.where(ref.allowed_pairs(raw.shape, **arguments), capped + bias, -np.inf)
    weights = ref.attention(q, k, k, scale=0.5, softcap=2.0, **arguments).weights
    assert_close(scores, (raw, capped, with_bias, weights)[mode])


def test_what_is_refused(backend):
    with pytest.raises(pa.UnknownBackendError, match="numpyy"):
        operators("numpyy")
    with pytest.raises(pa.errors.ArgumentError, match="device"):
        operators(device="cpu")
    q = np.zeros((1, 2, 6), dtype=np.float32)
    with pytest.raises(pa.ShapeError, match="q_num_heads"):
        run("g (float[1,2,6] q) => (float[1,2,6] y) { y = Attention (q, q, q) }", [q], backend)
    with pytest.raises(pa.ShapeError, match="q_num_heads"):
        run("g (float[1,2,6] q) => (float[1,2,6] y) { y = Attention <q_num_heads=4> (q, q, q) }", [q], backend)
    with pytest.raises(pa.ShapeError, match="Scale"):
        run("g (float[1,2,6] q, float[5] w) => (float[1,2,6] y) { y = RMSNormalization (q, w) }",
            [q, np.ones(5, dtype=np.float32)], backend)  # fmt: skip
