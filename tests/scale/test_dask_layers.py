"""Layers on Dask arrays, and Dask as the backend of a call on arrays of another library."""

import dask
import dask.array as da
import numpy as np
import pytest

import polyattn as pa

X = np.random.default_rng(0).normal(size=(4, 40, 32))
LAYERS = {
    "norm": (lambda: pa.LayerNorm(32, dtype="float64"), {}),
    "feed-forward": (lambda: pa.FeedForward(32, 64, dtype="float64"), {}),
    "attention": (lambda: pa.MultiHeadAttention(32, 4, num_kv_heads=2, dtype="float64"), {"causal": True}),
    "block": (lambda: pa.TransformerBlock(32, 4, dtype="float64"), {"causal": True}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_batch_and_sequence_chunks(name):
    make, arguments = LAYERS[name]
    layer, x = make(), da.from_array(X, chunks=(2, 16, 32))
    y, cache = layer.forward(X, **arguments)
    inputs, grads = layer.backward(np.cos(y), cache)
    lazy, lazy_cache = layer.to("dask").forward(x, **arguments)
    lazy_inputs, lazy_grads = layer.to("dask").backward(da.cos(lazy), lazy_cache)
    assert lazy.chunks == x.chunks
    got, dx, parameters = dask.compute(lazy, lazy_inputs[0], lazy_grads)
    np.testing.assert_allclose(got, y, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(dx, inputs[0], rtol=1e-10, atol=1e-11)
    for key, grad in grads.items():
        np.testing.assert_allclose(parameters[key], grad, rtol=1e-10, atol=1e-10)


def test_selected_by_the_environment_it_computes_numpy_arrays(monkeypatch):
    want, cache = pa.attention_forward(X, X, X, causal=True)
    grads = pa.attention_backward(want, cache)
    monkeypatch.setenv("POLYATTN_BACKEND", "dask")
    monkeypatch.setattr("polyattn.distributed.dask._arrays.POSITIONS", 16)
    out, cache = pa.attention_forward(X, X, X, causal=True)
    assert isinstance(out, np.ndarray)
    assert (cache.place.backend.name, cache.kernel) == ("dask", "graph")
    assert cache.saved.q.chunks == ((4,), (16, 16, 8), (32,))
    np.testing.assert_allclose(out, want, rtol=1e-11, atol=1e-11)
    for got, grad in zip(pa.attention_backward(want, cache)[:3], grads[:3], strict=True):
        np.testing.assert_allclose(got, grad, rtol=1e-11, atol=1e-11)


def test_the_forward_runs_once(monkeypatch):
    """The result, its statistics and the gradients come back one by one, from one computation each way."""
    from polyattn.distributed.dask import _tasks

    calls, forward = [], _tasks.block.forward
    monkeypatch.setattr(_tasks.block, "forward", lambda *given: calls.append(1) or forward(*given))
    with pa.use_backend("dask"):
        out, cache = pa.attention_forward(X, X, X)
        pa.attention_backward(out, cache)
    assert len(calls) == 1
