"""JAX in 32-bit mode: float64 is refused, integers that fit are narrowed, no flag is set."""

import jax
import numpy as np
import pytest

import polyattn as pa
from polyattn import functional as F


def refused(call, kind, *words):
    with pytest.raises(kind) as raised:
        call()
    assert all(word in str(raised.value) for word in words), raised.value


x = np.linspace(-1, 1, 24).reshape(1, 2, 3, 4)
small = x.astype(np.float32)
how = ('jax.config.update("jax_enable_x64", True)', "JAX_ENABLE_X64=1")
refused(lambda: pa.to_backend(x, "jax"), pa.DTypeError, "x: jax is in 32-bit mode and has no float64", *how)
refused(lambda: pa.attention(x, x, x, backend="jax"), pa.DTypeError, "q: ", *how)
refused(lambda: pa.Projection(4, 4, dtype="float64", backend="jax"), pa.DTypeError, *how)
refused(lambda: pa.LayerNorm(4, backend="jax")(x), pa.DTypeError, "x: expected float32")
refused(lambda: pa.to_backend(np.arange(3), "jax"), pa.DTypeError, "x: ", "int64")
for kind in (np.int64, np.uint32, np.uint64, np.int32, np.int16):
    lengths, labels = np.array([2], kind), np.array([[0, 3, 1], [2, 2, 0]], kind)
    ids = np.array([0, 0, 1], kind)
    arguments = {"key_lengths": lengths, "segment_ids": (ids, ids), "mask": np.tri(3, dtype=bool)}
    out = pa.attention(small, small, small, backend="jax", **arguments)
    assert np.allclose(out, pa.attention(small, small, small, **arguments), atol=1e-6)
    with pa.use_backend("jax"), pa.transfers() as account:
        loss, cache = F.cross_entropy_forward(small[0], labels)
        grads = F.cross_entropy_backward(np.ones_like(loss), cache)
    assert np.allclose(loss, F.cross_entropy(small[0], labels), atol=1e-6)
    assert grads.labels is None
    crossing = account.crossings[1]
    assert crossing.what == "labels"
    assert crossing.copied or kind in (np.int32, np.int16, np.uint32)
huge = np.array([0, 2**40, 1])
refused(
    lambda: pa.attention(small, small, small, backend="jax", segment_ids=(huge, huge)),
    pa.DTypeError, "q_segments: its values do not fit int32", "int64",
)  # fmt: skip
with pa.transfers("forbid"):
    refused(lambda: pa.attention(small, small, small, backend="jax"), pa.BackendMismatchError, "q: would go")
sinks = np.array([0.5, -0.2], np.float32)
way = np.ones_like(small)
grads = []
for name in ("jax", "numpy"):  # the native library computes this gradient in float64
    with pa.use_backend(name):
        grads.append(pa.attention_backward(way, pa.attention_forward(small, small, small, sinks=sinks)[1]).sinks)
assert np.allclose(*grads, rtol=1e-6)
layer = pa.Projection(4, 4, seed=1, backend="jax")
assert np.array_equal(layer.parameters()["weight"], pa.Projection(4, 4, seed=1).parameters()["weight"])
assert not jax.config.jax_enable_x64
