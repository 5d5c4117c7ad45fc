"""The kernels floor: dropout bits, exclusion, and the choice among kernels. NumPy only."""

from __future__ import annotations

import math

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry
from polyattn.kernels import GENERIC, choose
from polyattn.kernels._dropout import threefry
from polyattn.kernels._exclusion import matmul_excluding

NUMPY = registry.ready("numpy")


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], dtype=np.uint32).view(np.int32) for word in text.split()]


@pytest.mark.parametrize(
    ("rounds", "counter", "key", "expected"),
    [  # Random123's kat_vectors for threefry2x32
        (13, "00000000 00000000", "00000000 00000000", "9d1c5ec6 8bd50731"),
        (13, "ffffffff ffffffff", "ffffffff ffffffff", "fd36d048 2d17272c"),
        (13, "243f6a88 85a308d3", "13198a2e 03707344", "ba3e4725 f27d669e"),
        (20, "00000000 00000000", "00000000 00000000", "6b200159 99ba4efe"),
        (20, "ffffffff ffffffff", "ffffffff ffffffff", "1cb996fc bb002be7"),
        (20, "243f6a88 85a308d3", "13198a2e 03707344", "c4923a9c 483df7a0"),
    ],
)
def test_threefry_gives_the_known_answers(rounds: int, counter: str, key: str, expected: str) -> None:
    result = threefry(np, *words(key), *words(counter), rounds=rounds)
    assert [f"{int(word.view(np.uint32)[0]):08x}" for word in result] == expected.split()


def kept(seed: object, shape: tuple[int, ...] = (2, 3, 4, 6), p: float = 0.5) -> np.ndarray:
    """Return the dropout mask from attention's output, with uniform weights and one-hot values."""
    *lead, n_q, n_k = shape
    q, k = np.zeros((*lead, n_q, 1)), np.zeros((*lead, n_k, 1))
    v = np.broadcast_to(np.eye(n_k), (*lead, n_k, n_k))
    return pa.attention(q, k, v, dropout=p, seed=seed) > 0


def test_keep_mask_golden_vector() -> None:
    rows = ["".join("01"[bit] for bit in row) for row in kept(2026)[0, 0].astype(int)]
    assert rows == ["111100", "111000", "001110", "110110"]


def test_keep_mask_follows_threefry_lane_by_lane() -> None:
    mask = kept(7).reshape(-1, 6)
    for row in range(mask.shape[0]):
        for key in range(6):
            seed, zero = np.array([7], dtype=np.int32), np.array([0], dtype=np.int32)
            block = threefry(np, seed, zero, np.array([row], dtype=np.int32), np.array([key // 4], dtype=np.int32))
            lane = (int(block[key % 4 // 2].view(np.uint32)[0]) >> 16 * (key % 2)) & 0xFFFF
            assert mask[row, key] == (lane >= 32768)


@pytest.mark.parametrize("seed", [0, 5, 2**31 - 1, 2**40 + 3, -1, -(2**40)])
def test_a_seed_may_be_an_array_of_any_width(seed: int) -> None:
    expected = kept(seed)
    assert np.array_equal(kept(np.asarray(seed, dtype=np.int64)), expected)
    if abs(seed) < 2**31:
        assert np.array_equal(kept(np.asarray(seed, dtype=np.int32)), expected)


def test_half_the_weights_are_kept_on_average() -> None:
    share = kept(1, (1, 1, 256, 256)).mean()
    assert abs(share - 0.5) < 4 * 0.5 / 256


def test_excluded_rows_reach_nothing_and_genuine_ones_are_not_hidden() -> None:
    allowed = np.array([[True, False, True], [True, True, False]])
    a = np.where(allowed, [[1.0, 9, 2], [0.5, -1, 9]], 0.0)
    b = np.array([[1.0, 1, 1, 1], [np.nan, np.inf, -np.inf, 2], [np.nan, np.inf, 3, 4]])
    with np.errstate(all="ignore"):
        result = matmul_excluding(NUMPY, a, b, allowed)
    expected = [[math.nan, math.inf, 7, 9], [math.nan, -math.inf, math.inf, -1.5]]
    np.testing.assert_array_equal(result, expected)


class Fussy:
    """A kernel for causal problems only."""

    name = "fussy"

    def supports(self, problem: object) -> str | None:
        return None if problem.causal else "it is not causal"  # type: ignore[attr-defined]

    def forward(self, q, k, v, problem):  # type: ignore[no-untyped-def]
        out, lse = GENERIC.forward(q, k, v, problem)
        return out * 0 + 42, lse

    def backward(self, dout, dlse, q, k, v, out, lse, problem):  # type: ignore[no-untyped-def]
        return GENERIC.backward(dout, dlse, q, k, v, out, lse, problem)


@pytest.fixture
def fussy(monkeypatch: pytest.MonkeyPatch) -> Fussy:
    kernel = Fussy()
    monkeypatch.setattr(type(NUMPY), "kernels", (kernel,))
    return kernel


def test_the_first_kernel_that_supports_the_problem_runs(fussy: Fussy) -> None:
    q = np.ones((1, 2, 3))
    out, cache = pa.attention_forward(q, q, q, causal=True)
    assert cache.kernel == "fussy"
    assert (out == 42).all()
    out, cache = pa.attention_forward(q, q, q)
    assert cache.kernel == GENERIC.name
    assert (out == 1).all()


def test_a_forced_kernel_runs_or_says_why_not(fussy: Fussy) -> None:
    q = np.ones((1, 2, 3))
    assert (pa.attention(q, q, q, causal=True, kernel="plain") == 1).all()
    with pytest.raises(pa.KernelUnsupportedError, match="'fussy' does not compute this problem: it is not causal"):
        pa.attention(q, q, q, kernel="fussy")
    with pytest.raises(pa.KernelUnsupportedError, match="no kernel 'flash'; it has 'fussy', 'tiled', 'plain'"):
        pa.attention(q, q, q, kernel="flash")


def test_explain_names_the_kernel_and_each_refusal(fussy: Fussy) -> None:
    q = np.ones((1, 2, 3), dtype=np.float32)
    found = pa.explain(q, q, q)
    assert found.kernel == "tiled"
    assert found.refusals == {"fussy": "it is not causal", "plain": "supported, but tiled comes before it"}
    assert found.forward_flops == 2 * 2 * 2 * (3 + 3)
    assert found.bytes == 4 * 4 * 6
    assert "fussy: it is not causal" in str(found)
    assert pa.explain(q, q, q, causal=True).kernel == "fussy"
    with pytest.raises(pa.BackendMismatchError, match="v: expected an array, got NoneType"):
        pa.explain(q, q, None)


def test_features_of_length_zero_go_to_the_generic_kernel(fussy: Fussy) -> None:
    q, v = np.ones((1, 2, 0)), np.ones((1, 2, 4))
    out, cache = pa.attention_forward(q, q, v, causal=True)
    assert cache.kernel == GENERIC.name
    assert (out == 1).all()
    assert pa.explain(q, q, v, causal=True).kernel == GENERIC.name


def test_the_generic_kernel_supports_everything() -> None:
    assert choose((), None) is GENERIC  # type: ignore[arg-type]
