"""A fork after JAX has computed: the child reads its arrays and computes on NumPy, and JAX says why it cannot."""

import os
import signal
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import polyattn as pa

warnings.simplefilter("ignore")  # Python and JAX warn of a fork with threads, which is the subject
x = np.random.default_rng(0).standard_normal((2, 4, 4)).astype(np.float32)
y = jnp.asarray(x)
want, layer = pa.attention(x, x, x), pa.Projection(4, 4, backend="jax")
pa.functional.softmax(y)

REFUSED = (
    lambda: pa.attention(y, y, y),
    lambda: pa.attention_forward(y, y, y),
    lambda: layer(y),
    lambda: pa.attention(x, x, x, backend="jax"),
    lambda: pa.KVCache.create(1, 1, 2, 4, backend="jax"),
)


def child():
    assert np.array_equal(pa.to_backend(y, "numpy"), x)
    assert np.array_equal(pa.attention(x, x, x), want)
    assert layer.to("numpy")(x).shape == x.shape
    for call in REFUSED:
        with pytest.raises(pa.BackendUnavailableError, match="forked after jax was loaded"):
            call()
    (info,) = (info for info in pa.list_backends() if info.name == "jax")
    assert (info.state, "spawn" in info.reason) == ("unavailable", True)


process = os.fork()
if process == 0:
    signal.alarm(60)  # a child that waits for ever is ended by this
    try:
        child()
    except BaseException as fault:
        os.write(2, repr(fault).encode())
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
assert np.array_equal(pa.attention(x, x, x), want)
pa.functional.softmax(y).block_until_ready()
