"""The scalings of rotary embedding against known values, and their errors.

The answers are those of transformers 5.24.0, ``ROPE_INIT_FUNCTIONS``, which computes them in float32.
"""

import numpy as np
import pytest

import polyattn as pa

F = pa.functional

# Scaling, dim, base, magnitude, and the frequencies of some pairs.
KNOWN = {
    "ntk": (
        *(F.NTKScaling(8.0), 64, 1e4, 1.0),
        {8: 0.05847154185175896, 16: 0.0034189207945019007, 24: 0.00019990955479443073, 31: 1.666901880525984e-5},
    ),
    "yarn": (
        *(F.YaRNScaling(40.0, 4096), 64, 1e4, 1.3688879454113936),
        {8: 0.10000000149011612, 12: 0.026879360899329185, 16: 0.005500000435858965, 24: 2.499999936844688e-5},
    ),
    "yarn-not-truncated": (
        *(F.YaRNScaling(32.0, 4096, truncate=False), 64, 1.5e5, 1.3465735902799727),
        {8: 0.05081327259540558, 9: 0.031705696135759354, 12: 0.006794959306716919, 31: 3.023511396804679e-07},
    ),
    "llama3": (
        *(F.Llama3Scaling(), 128, 5e5, 1.0),
        {24: 0.00729266507551074, 30: 0.0013718936825171113, 34: 0.0001785077911335975, 63: 3.068925877869333e-07},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name):
    scaling, dim, base, magnitude, expected = KNOWN[name]
    frequencies = scaling.frequencies(dim, base)
    assert frequencies.shape == (dim // 2,)
    np.testing.assert_allclose(frequencies[list(expected)], list(expected.values()), rtol=5e-7)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-15)


def test_linear():
    plain = F.RotaryScaling().frequencies(64, 1e4)
    np.testing.assert_allclose(F.LinearScaling(4.0).frequencies(64, 1e4), plain / 4, rtol=1e-15)
    np.testing.assert_allclose(plain[:2], [1.0, 1e4 ** (-2 / 64)], rtol=1e-15)


@pytest.mark.parametrize(
    "scaling", [F.LinearScaling(1), F.NTKScaling(1), F.YaRNScaling(1, 4096), F.Llama3Scaling(1)], ids=repr
)
def test_a_factor_of_one_changes_nothing(scaling):
    np.testing.assert_allclose(scaling.frequencies(64, 1e4), F.RotaryScaling().frequencies(64, 1e4), rtol=1e-15)
    assert scaling.magnitude == 1.0


def test_ntk_keeps_the_fastest_and_divides_the_slowest():
    plain, scaled = F.RotaryScaling().frequencies(64, 1e4), F.NTKScaling(8.0).frequencies(64, 1e4)
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8)
    np.testing.assert_array_equal(F.NTKScaling(8.0).frequencies(2, 1e4), [1.0])


def test_a_given_attention_factor_is_taken():
    assert F.YaRNScaling(4.0, 4096, attention_factor=1.5).magnitude == 1.5
    x = np.ones((1, 64))
    turned = F.rotary_embedding(x, scaling=F.YaRNScaling(4.0, 4096, attention_factor=1.5))
    np.testing.assert_allclose(turned, 1.5 * x)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: F.LinearScaling(0.5), "factor"),
        (lambda: F.LinearScaling("8"), "factor"),
        (lambda: F.NTKScaling(float("inf")), "factor"),
        (lambda: F.YaRNScaling(2.0, 0), "original_length"),
        (lambda: F.YaRNScaling(2.0, 4096, beta_fast=1.0), "beta_fast"),
        (lambda: F.YaRNScaling(2.0, 4096, attention_factor=-1.0), "attention_factor"),
        (lambda: F.Llama3Scaling(low_freq_factor=4.0), "high_freq_factor"),
        (lambda: F.Llama3Scaling(original_length=None), "original_length"),
    ],
)
def test_bad_numbers(make, word):
    with pytest.raises(pa.ArgumentError, match=f"{word}: expected"):
        make()
