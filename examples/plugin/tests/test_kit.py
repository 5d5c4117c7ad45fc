"""Selection of the backend mlx, and the conformance kit on it."""

import numpy as np

import polyattn as pa
from polyattn.testing import run_check


def test_selected_by_name_it_computes():
    x = np.random.default_rng(0).standard_normal((2, 4, 10, 16), dtype=np.float32)
    with pa.use_backend("mlx"):
        out, cache = pa.attention_forward(x, x, x, causal=True)
    assert cache.place.backend.name == "mlx"
    np.testing.assert_allclose(out, pa.attention(x, x, x, causal=True), rtol=1e-4, atol=1e-5)


def test_the_kit():
    report = run_check("mlx")
    wrong = [f"{row.check}: {row.detail}" for row in report.rows if row.outcome == "failed"]
    assert not wrong, "\n".join(wrong)
    assert report.passed
