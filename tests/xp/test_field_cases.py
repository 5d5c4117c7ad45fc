"""Known faults of other implementations, by number: the test of each, and more cases of the same kind."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import TOLERANCES, assert_close
from polyattn.testing import references as ref
from polyattn.testing.features import lacking
from polyattn.testing.plugin import TARGET

F = pa.functional
ROOT = Path(__file__).resolve().parents[2]
KIT, HERE = "src/polyattn/testing/conformance", "tests/xp/test_field_cases.py"

# Where the value of each case is tested. The conformance kit runs on every backend, as this file does.
KEPT = {
    1: [
        (f"{KIT}/test_masks.py", "test_empty_row"),
        (f"{KIT}/test_masks.py", "test_empty_row_after_a_projection_is_its_bias"),
    ],
    2: [(f"{KIT}/test_masks.py", "test_causal_with_left_padding"), (HERE, "test_case_2_combined_masks")],
    3: [(f"{KIT}/test_masks.py", "test_bias_is_no_mask_and_a_mask_no_bias"), (HERE, "test_case_3_masks_of_numbers")],
    4: [(f"{KIT}/test_masks.py", "test_padding_is_of_keys")],
    5: [(f"{KIT}/test_masks.py", "test_masks_broadcast")],
    6: [(f"{KIT}/test_masks.py", "test_causal_alignment")],
    7: [(f"{KIT}/test_masks.py", "test_more_queries_than_keys")],
    8: [(f"{KIT}/test_masks.py", "test_zero_size_axes")],
    9: [(HERE, "test_case_9_lengths_that_differ")],
    10: [(f"{KIT}/test_masks.py", "test_large_batch")],
    11: [(f"{KIT}/test_masks.py", "test_views_equal_their_copies")],
    12: [(f"{KIT}/test_masks.py", "test_float16_scores_overflow"), (HERE, "test_case_12_scores_beyond_the_dtype")],
    13: [(f"{KIT}/test_functional.py", "test_layer_norm_in_low_precision")],
    14: [(HERE, "test_case_14_rotary_angles")],
    15: [
        (f"{KIT}/test_dropout.py", "test_one_key"),
        (f"{KIT}/test_dropout.py", "test_backward_uses_the_same_mask_and_factor"),
        (f"{KIT}/test_dropout.py", "test_dropping_everything"),
        (f"{KIT}/test_dropout.py", "test_dropping_nothing"),
        (f"{KIT}/test_dropout.py", "test_weights_are_those_before_dropout"),
    ],
    16: [
        (f"{KIT}/test_optim.py", "test_no_gradient_in_low_precision"),
        (f"{KIT}/test_optim.py", "test_one_step_in_low_precision"),
    ],
    17: [(f"{KIT}/test_optim.py", "test_decay_without_momentum")],
    18: [(f"{KIT}/test_optim.py", "test_order_and_epsilon_of_adamw")],
    19: [("tests/cli/test_train_data.py", "test_field_case_19_a_resumed_run_goes_on_in_the_same_order")],
    20: [(f"{KIT}/test_caches.py", "test_threads_do_not_meet")],
    21: [
        ("tests/dispatch/test_threads.py", "test_fork"),
        ("tests/backends/numpy/test_threads.py", "test_after_a_fork"),
    ],
    22: [("tests/plugins/test_broken_plugins.py", "test_a_broken_plugin")],
    23: [(f"{KIT}/test_errors.py", "test_read_only_arrays_are_never_written")],
    24: [(HERE, "test_case_24_declared_shapes")],
}  # fmt: skip


def test_every_case_is_kept():
    assert sorted(KEPT) == list(range(1, 25))
    for case, places in KEPT.items():
        for path, name in places:
            source = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"case {case}: {path} has no {name}"


IDS = (np.array([0, 0, 1, 1], dtype=np.int32), np.array([0, 0, 1, 1], dtype=np.int32))
EXCLUDING = {
    "mask": np.array([False, True, True, True]),
    "bias": np.where(np.eye(4)[::-1] > 0, -np.inf, 0.5),
    "causal": True,
    "window": (1, 1),
    "key_lengths": 3,
    "segment_ids": IDS,
}


def pytest_generate_tests(metafunc):
    if "names" in metafunc.fixturenames:
        pairs = [*itertools.combinations(EXCLUDING, 2)]
        # A library that compiles does so for each combination in each dtype: there the reported pair stands for all.
        chosen = [("mask", "causal")] if lacking(metafunc.config.stash[TARGET], "any_shape") else pairs
        metafunc.parametrize("names", [*chosen, tuple(EXCLUDING)], ids="-".join)


def test_case_2_combined_masks(names, dtype, make, to_np):
    """Any two arguments that exclude, and all of them: their intersection, zeros where it is empty, no NaN."""
    x = make(np.random.default_rng(2).standard_normal((1, 2, 4, 8)), dtype)
    arguments = {name: EXCLUDING[name] for name in names}
    held = to_np(x).astype(np.float64)
    allowed = ref.allowed_pairs((1, 2, 4, 4), **arguments)
    np.testing.assert_array_equal(
        allowed, np.logical_and.reduce([ref.allowed_pairs((1, 2, 4, 4), **{n: v}) for n, v in arguments.items()])
    )
    kinds = {"b": "bool", "i": "int32", "f": dtype}
    given = {
        name: make(value, kinds[value.dtype.kind]) if isinstance(value, np.ndarray)
        else tuple(make(ids, "int32") for ids in value) if name == "segment_ids" else value
        for name, value in arguments.items()
    }  # fmt: skip
    out, cache = pa.attention_forward(x, x, x, **given)
    grads = pa.attention_backward(x, cache)
    want = ref.attention(held, held, held, mask=allowed, bias=arguments.get("bias"))
    slopes = ref.attention_gradients(held, held, held, held, mask=allowed, bias=arguments.get("bias"))
    assert_close(to_np(out), want.out, dtype)
    assert not to_np(out)[~allowed.any(axis=-1)].any()
    for name in ("q", "k", "v"):
        slope = getattr(slopes, name)
        size = max(1.0, np.abs(slope).max())  # where a row sees one key it is zero, and its terms are near one
        assert_close(to_np(getattr(grads, name)), slope, dtype, scale=size, what=f"gradient of {name}")


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32"])
def test_case_3_masks_of_numbers(kind, make):
    """A mask must be boolean, not zeros and ones of another dtype, and a bias must not be boolean."""
    q, k = make(np.zeros((1, 4))), make(np.zeros((3, 4)))
    with pytest.raises(pa.DTypeError, match="bias="):
        pa.attention(q, k, k, mask=make([1, 1, 0], kind))
    if kind != "float32":
        with pytest.raises(pa.DTypeError, match="bias"):
            pa.attention(q, k, k, bias=make([1, 1, 0], kind))
    with pytest.raises(pa.DTypeError, match="bias"):
        pa.attention(q, k, k, bias=make([True, True, False], "bool"))


@pytest.mark.parametrize("extra", [-1, 1])
@pytest.mark.parametrize("compiled", [False, True])
def test_case_9_lengths_that_differ(extra, compiled, contract, make):
    """A v, mask, bias or segment_ids of another length than k raises at the call, also while a compiler traces."""
    q, k, v = (make(np.zeros((1, 1, n, 8))) for n in (3, 5, 5))
    wrong = 5 + extra
    faults = {
        "v": {},
        "mask": {"mask": make(np.ones((3, wrong)), "bool")},
        "bias": {"bias": make(np.ones((3, wrong)))},
        "segment_ids": {"segment_ids": (make(np.ones(3), "int32"), make(np.ones(wrong), "int32"))},
    }
    for name, arguments in faults.items():
        values = make(np.zeros((1, 1, wrong, 8))) if name == "v" else v

        def call(q, k, v, arguments=arguments):
            return pa.attention(q, k, v, **arguments)

        with pytest.raises(pa.ShapeError, match=name):
            (contract.jit(call) if compiled else call)(q, k, values)


def test_case_12_scores_beyond_the_dtype(dtype, make, to_np):
    """64 products of 40 by 40: 0.45398 forward, and the backward's gradients of the reference."""
    hosts = [np.full((1, 64), 40.0), np.stack([np.full(64, 40.0), np.full(64, 39.96875)]), [[0.0], [10000.0]]]
    q, k, v = (make(x, dtype) for x in hosts)
    held = [to_np(x).astype(np.float64) for x in (q, k, v)]  # bfloat16 has no 39.96875
    out, cache = pa.attention_forward(q, k, v)
    grads = pa.attention_backward(make([[1.0]], dtype), cache)
    if dtype != "bfloat16":
        assert abs(to_np(out)[0, 0] - 0.45398) <= 5e-3 * 0.45398
    # Near 12800 float32 has a thousandth between two numbers: a log-sum-exp of such scores says no more.
    looser = dtype if dtype in ("float64", "bfloat16") else "float16"
    assert_close(to_np(out), ref.attention(*held).out, looser)
    assert_close(to_np(grads.v), ref.attention_gradients([[1.0]], *held).v, looser)
    assert np.isfinite(to_np(cache.lse)).all()
    assert np.isfinite(to_np(grads.q)).all()
    assert np.isfinite(to_np(grads.k)).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_case_14_rotary_angles(interleaved, dtype, make, to_np):
    """Angles are in float32 at least, whatever the dtype of x; the result is cast last."""
    known = {(1857, 1): (0.3066928, 0.9518086), (4096, 0): (0.8039906, None), (4097, 0): (0.9347720, None)}
    for (position, pair), (cos, sin) in known.items():
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, 16 + pair)
        x = np.zeros((1, 32))
        x[0, first] = 1.0
        for how in ({"offset": position}, {"positions": make([position], "int32")}):
            y = to_np(F.rotary_embedding(make(x, dtype), base=1e4, interleaved=interleaved, **how))
            tolerance = max(TOLERANCES[dtype] / 2, 1e-6)
            assert abs(y[0, first] - cos) <= tolerance
            assert sin is None or abs(y[0, second] - sin) <= tolerance


X = np.random.default_rng(24).standard_normal((2, 3, 4))
SHAPED = {
    "attention": lambda make, x: pa.attention(x, x[:, :2, :], x[:, :2, :3], causal=True),
    "attention, queries of none": lambda make, x: pa.attention(x[:, :0, :], x, x),
    "attention, keys of none": lambda make, x: pa.attention(x, x[:, :0, :], x[:, :0, :1]),
    "attention, broadcast": lambda make, x: pa.attention(x[:, None, ...], x[:1, None, ...], x[None, :1, ...]),
    "attention_weights": lambda make, x: pa.attention_weights(x, x[:, :2, :]),
    "cross_entropy": lambda make, x: F.cross_entropy(x, make([[0, 1, 2], [3, 0, 1]], "int32")),
    "cross_entropy, one by one": lambda make, x: F.cross_entropy(
        x, make([[0, 1, 2], [3, 0, 1]], "int32"), reduction="none"
    ),
    "gelu": lambda make, x: F.gelu(x),
    "layer_norm": lambda make, x: F.layer_norm(x),
    "linear": lambda make, x: F.linear(x, make(np.ones((4, 5)))),
    "mse_loss": lambda make, x: F.mse_loss(x, x),
    "relu": lambda make, x: F.relu(x),
    "rotary_embedding": lambda make, x: F.rotary_embedding(x, dim=2),
    "softmax": lambda make, x: F.softmax(x, axis=1),
}


@pytest.mark.parametrize("name", SHAPED)
def test_case_24_declared_shapes(name, contract, make, to_np):
    """The shape and dtype of a traced result equal those of the computed result."""
    declared = []

    def function(x):
        y = SHAPED[name](make, x)
        declared.append((tuple(y.shape), y.dtype))
        return y

    y = contract.jit(function)(make(X))
    eager = SHAPED[name](make, make(X))
    assert declared
    assert {*declared} == {(tuple(y.shape), y.dtype)}
    assert to_np(y).shape == to_np(eager).shape == tuple(y.shape)
    assert_close(to_np(y), to_np(eager))
