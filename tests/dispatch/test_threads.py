"""Threads and processes: ten concurrent threads get their own results, and both processes work after a fork."""

import os

import numpy as np
import pytest
from at_once import run_at_once

import polyattn as pa
from polyattn import registry


def test_ten_threads(home, place, native, host):
    """Thread i computes with arrays full of i, plain and transposed: no result is that of another thread."""

    def work(i):
        full = np.full((2, 16, 16), float(i))
        x = native(home, full)
        for _ in range(3):
            for view in (x, x.mT):
                with pa.use_backend(place), pa.transfers() as account:
                    out, cache = pa.attention_forward(view, view, view, causal=True)
                    grads = pa.attention_backward(view, cache)
                assert np.allclose(host(out), full, rtol=1e-12, atol=0)
                assert np.allclose(host(grads.v).sum(axis=-2), 16.0 * i, rtol=1e-12)
                # Three inputs, out, two row statistics, dout and three gradients.
                assert account.count == (0 if home == place else 10)
        assert np.array_equal(host(x), full)

    run_at_once(work, 10)


def test_a_layer_in_ten_threads(place):
    """One layer, ten inputs: no state is shared between the calls, and parameters are only read."""
    layer = pa.MultiHeadAttention(8, 2, dtype="float64", backend=place)
    inputs = np.random.default_rng(0).standard_normal((10, 3, 8))
    alone = [layer.forward(x) for x in inputs]
    expected = [layer.backward(y, cache) for y, cache in alone]

    def work(i):
        y, cache = layer.forward(inputs[i])
        dx, grads = layer.backward(y, cache)
        assert np.array_equal(y, alone[i][0])
        assert np.allclose(dx[0], expected[i][0][0], rtol=1e-13)
        assert grads.keys() == expected[i][1].keys()

    run_at_once(work, 10)


def test_every_backend_first_met_by_sixteen_threads(place, program):
    """Nothing is loaded yet: all threads discover, load and call at the same time."""
    program("first_met", place)


def test_refreshing_under_way():
    """Discovery is repeated while calls run: they keep their backends, and results are correct."""
    x = np.arange(12.0).reshape(3, 4)
    expected = pa.functional.softmax(x)

    def work(i):
        for _ in range(40):
            if i == 0:
                registry.refresh()
            y, cache = pa.functional.softmax_forward(x)
            pa.functional.softmax_backward(y, cache)
            assert np.array_equal(y, expected)

    run_at_once(work, 4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("selection", ["", "numpy"])
def test_fork(selection, program):
    """A large product and attention in the parent, attention in the child, then in the parent: all end, all correct."""
    program("fork", POLYATTN_BACKEND=selection)
