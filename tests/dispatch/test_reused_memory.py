"""A caller may reuse its buffers after a call: libraries that compute asynchronously have finished."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polyattn as pa

N = 1024


def aligned(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return random float32 memory at an address that JAX shares, a multiple of 64."""
    count = int(np.prod(shape))
    buffer = np.empty(count + 16, dtype=np.float32)
    start = -buffer.ctypes.data // 4 % 16
    x = buffer[start : start + count].reshape(shape)
    x[...] = np.random.default_rng(0).standard_normal(shape)
    return x


@pytest.mark.parametrize("offset", [0, 1], ids=["shared", "copied"])
def test_parameter_gradients_do_not_change_with_the_upstream_gradient(target: str, offset: int) -> None:
    layer = pa.Projection(N, N, backend=target)
    x = aligned((2 * N, N))
    _, cache = layer.forward(x)
    expected = x.T.astype(np.float64) @ np.ones((2 * N, N))
    for _ in range(3):
        dy = aligned((2 * N + 1, N)).reshape(-1)[offset : offset + 2 * N * N].reshape(2 * N, N)
        dy[...] = 1
        _, grads = layer.backward(dy, cache)
        dy[...] = 0
        got = pa.to_backend(grads["weight"], "numpy")
        assert np.allclose(got, expected, atol=1e-2 * np.abs(expected).max())


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
def test_what_was_copied_does_not_change_any_more(target: str, offset: int) -> None:
    for copy in (None, True):
        x = aligned((N * N + 1,))[offset : offset + N * N]
        before = x.copy()
        with pa.transfers() as account:
            y = pa.to_backend(x, target, copy=copy)
        x[...] = 0
        if copy or (account.crossings and account.crossings[0].copied):
            assert np.array_equal(pa.to_backend(y, "numpy"), before)
