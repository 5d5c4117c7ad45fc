"""Checkpoints written before layers owned child layers load, and give the results that were computed then.

``tests/data/checkpoints`` holds what ``save`` of commit 0599d93 wrote, and that commit's results on NumPy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import polyattn as pa
from polyattn.checkpoint import read_tensors

FOLDER = Path(__file__).parents[1] / "data" / "checkpoints"
LAYERS = {
    "multi_head_attention": lambda **at: pa.MultiHeadAttention(
        16, 4, num_kv_heads=2, rotary=True, qk_norm="rms", sinks=True, **at
    ),
    "transformer_block": lambda **at: pa.TransformerBlock(
        16, 4, norm="layer", activation="swiglu", num_kv_heads=2, **at
    ),
    "feed_forward": lambda **at: pa.FeedForward(8, 12, activation="geglu", **at),
}


@pytest.mark.parametrize("name", LAYERS)
def test_loads_and_computes_the_same(name, contract, make, to_np):
    layer = LAYERS[name](seed=9, backend=contract.name)
    expected = np.load(FOLDER / f"{name}.npy")
    x = make(np.linspace(-1, 1, expected.size, dtype=np.float32).reshape(expected.shape), "float32")
    assert np.max(np.abs(to_np(layer(x)) - expected)) > 0.1
    layer.load(FOLDER / f"{name}.safetensors")
    np.testing.assert_allclose(to_np(layer(x)), expected, rtol=0, atol=2e-6)
    assert set(layer.parameters()) == set(read_tensors(FOLDER / f"{name}.safetensors")[0])
