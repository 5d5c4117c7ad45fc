"""Dropout: the same mask on every backend and in the backward, the scale, and weights without dropout."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

RNG = np.random.default_rng(8)
Q, K = RNG.standard_normal((2, 2, 5, 4)), RNG.standard_normal((2, 2, 7, 4))
V, DOUT = RNG.standard_normal((2, 2, 7, 3)), RNG.standard_normal((2, 2, 5, 3))


@pytest.mark.parametrize(
    ("key", "counter", "block"),
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0xFD36D048, 0x2D17272C)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_reference_gives_the_known_answers(key: Any, counter: Any, block: Any) -> None:
    """Random123's test vectors for thirteen rounds."""
    assert ref.threefry2x32(key, counter) == block


# With the seed 190 one lane is 19660, just below 0.3 · 65536 rounded: it is dropped.
@pytest.mark.parametrize("seed", [0, 190, 2**40 + 3, 2**63 + 5])
@pytest.mark.parametrize("arguments", [{}, {"causal": True, "sinks": True}], ids=["plain", "causal-sinks"])
def test_value_and_gradients(make: Any, to_np: Any, seed: Any, arguments: Any) -> None:
    arguments = dict(arguments)
    host = dict(arguments)
    if arguments.pop("sinks", None):
        host["sinks"] = np.array([0.5, -1.0])
        arguments["sinks"] = make(host["sinks"])
    keep = ref.keep_mask((2, 2, 5, 7), 0.3, seed)
    assert 0.3 < keep.mean() < 0.95
    out, cache = pa.attention_forward(make(Q), make(K), make(V), dropout=0.3, seed=seed, **arguments)
    expected = ref.attention(Q, K, V, keep=keep, dropout=0.3, **host)
    assert_close(to_np(out), expected.out)
    assert_close(to_np(cache.lse), expected.lse)
    grads = pa.attention_backward(make(DOUT), cache)
    want = ref.attention_gradients(DOUT, Q, K, V, keep=keep, dropout=0.3, **host)
    for name in ("q", "k", "v"):
        assert_close(to_np(getattr(grads, name)), getattr(want, name), what=f"gradient of {name}")


def test_traced_seed(contract: Any, make: Any, to_np: Any) -> None:
    function = contract.jit(lambda q, k, v, seed: pa.attention(q, k, v, dropout=0.3, seed=seed))
    for seed in (3, 4):
        keep = ref.keep_mask((2, 2, 5, 7), 0.3, seed)
        out = function(make(Q), make(K), make(V), make(seed, "int32"))
        assert_close(to_np(out), ref.attention(Q, K, V, keep=keep, dropout=0.3).out)


def test_one_key(make: Any, to_np: Any) -> None:
    """Case 15: with one key and p = 0.2 the output is v · 1.25 or 0, and v on average."""
    q, k = make(np.zeros((400, 1, 2))), make(np.zeros((400, 1, 2)))
    out = to_np(pa.attention(q, k, make(np.full((400, 1, 1), 3.0)), dropout=0.2, seed=11)).reshape(-1)
    kept = out != 0.0
    assert_close(out[kept], np.full(kept.sum(), 3.75))
    assert abs(kept.mean() - 0.8) < 0.07


def test_backward_uses_the_same_mask_and_factor(make: Any, to_np: Any) -> None:
    q, v = make(np.zeros((8, 4, 2))), make(np.ones((8, 1, 1)))
    out, cache = pa.attention_forward(q, make(np.zeros((8, 1, 2))), v, dropout=0.75, seed=2)
    dv = to_np(pa.attention_backward(make(np.ones((8, 4, 1))), cache).v)
    assert_close(dv.reshape(-1), to_np(out).sum(axis=(1, 2)))
    assert set(np.unique(to_np(out))) == {0.0, 4.0}


def test_dropping_everything(make: Any, to_np: Any) -> None:
    out, cache = pa.attention_forward(make(Q), make(K), make(V), dropout=1.0, seed=1)
    np.testing.assert_array_equal(to_np(out), np.zeros((2, 2, 5, 3)))
    for gradient in pa.attention_backward(make(DOUT), cache)[:3]:
        assert not to_np(gradient).any()


def test_dropping_nothing(make: Any, to_np: Any) -> None:
    without = pa.attention(make(Q), make(K), make(V))
    np.testing.assert_array_equal(to_np(pa.attention(make(Q), make(K), make(V), dropout=0.0, seed=1)), to_np(without))


def test_weights_are_those_before_dropout(make: Any, to_np: Any) -> None:
    weights = to_np(pa.attention_weights(make(Q), make(K), dropout=0.5, seed=1))
    assert_close(weights, ref.attention(Q, K, V).weights)
    assert_close(weights.sum(-1), np.ones((2, 2, 5)))


def test_dropout_isolates_excluded_keys(make: Any, to_np: Any) -> None:
    k = K.copy()
    k[..., 5:, :] = np.nan
    keep = ref.keep_mask((2, 2, 5, 7), 0.3, 9)
    out, cache = pa.attention_forward(make(Q), make(k), make(V), key_lengths=5, dropout=0.3, seed=9)
    assert_close(to_np(out), ref.attention(Q, K, V, key_lengths=5, keep=keep, dropout=0.3).out)
    want = ref.attention_gradients(DOUT, Q, K, V, key_lengths=5, keep=keep, dropout=0.3)
    assert_close(to_np(pa.attention_backward(make(DOUT), cache).q), want.q)
