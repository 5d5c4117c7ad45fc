"""Two host devices of JAX: each computes what it was selected for, and the counts of transfers are right."""

import jax
import numpy as np
import pytest

import polyattn as pa
from polyattn import functional as F

info = next(info for info in pa.list_backends() if info.name == "jax")
assert info.devices == ("cpu", "cpu:1"), info.devices
host = np.arange(12, dtype=np.float32).reshape(3, 4)
first, second = (jax.device_put(host, device) for device in jax.devices())
with pa.transfers("forbid"):
    y, cache = F.softmax_forward(second)
    (dx,) = F.softmax_backward(y, cache)
assert y.devices() == dx.devices() == {jax.devices()[1]}
assert cache.place.device == "cpu:1"
with pa.use_backend("jax", device="cpu:1"), pa.transfers() as account:
    y, cache = F.softmax_forward(first)
    z = F.softmax(host)
assert y.devices() == {jax.devices()[0]}
assert cache.saved.y.devices() == {jax.devices()[1]}
assert type(z) is np.ndarray
assert z.flags.writeable
assert account.count == 4
assert all(crossing.copied for crossing in account.crossings)
with pytest.raises(pa.BackendMismatchError, match="q is jax on cpu, k is jax on cpu:1"):
    pa.attention(first, second, first)
there = pa.to_backend(host, "jax", "cpu:1")
host[...] = 9
assert there[0, 1] == 1
layer = pa.Projection(4, 2, backend="jax", device="cpu:1")
assert layer(np.ones((1, 4), np.float32)).shape == (1, 2)
assert jax.jit(layer)(second).devices() == {jax.devices()[1]}
