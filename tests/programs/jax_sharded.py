"""JAX's arrays on four host devices: ``jax_sharded.py attention``, ``layers`` or ``explicit_axes``."""

import re
import sys

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import polyattn as pa
from polyattn_native import status

try:
    from jax import shard_map
except ImportError:
    from jax.experimental.shard_map import shard_map
assert len(jax.devices()) == 4
mesh, rng = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model")), np.random.default_rng(0)


def put(tree, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def travels(compiled):
    return set(re.findall(r"= (\S+) (all-\w+|collective-permute|reduce-scatter)[(.]", compiled.as_text()))


def is_native(compiled):
    return "polyattn_attention_" in compiled.as_text()


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=1e-5)


def attention():
    """Divided by batch and by heads, each device computes its own part, and what comes out is divided as what went in.

    Under ``jit`` only single numbers travel, which say whether everything is finite; in ``shard_map`` nothing does.
    XLA cannot divide a call of the native library, so there is none under ``jit``; in ``shard_map`` each device has its
    own.
    """
    spec = P("data", "model")
    hosts = [rng.standard_normal((4, heads, 32, 4)).astype(np.float32) for heads in (8, 4, 4)]
    arrays = [put(x, spec) for x in hosts]
    out, cache = pa.attention_forward(*hosts, causal=True)
    grads = pa.attention_backward(2 * out, cache)[:3]
    ways = [x[::-1] for x in hosts]
    out_dot = pa.attention_jvp(*hosts, ways, causal=True)[1]

    def attend(q, k, v):
        return pa.attention(q, k, v, causal=True)

    def expect(function, travelling, native):
        def slopes(*x):
            return jax.grad(lambda *x: jnp.sum(function(*x) ** 2), argnums=(0, 1, 2))(*x)

        for call, want in ((lambda *x: [function(*x)], [out]), (slopes, grads)):
            compiled = jax.jit(call).lower(*arrays).compile()
            for got, expected in zip(compiled(*arrays), want, strict=True):
                close(got, expected)
                assert got.sharding.spec == spec, got.sharding
            assert travels(compiled) == travelling
            assert is_native(compiled) == native
        moved = jax.jit(lambda x, u: jax.jvp(function, x, u)[1])(tuple(arrays), tuple(put(u, spec) for u in ways))
        close(moved, out_dot)

    expect(attend, {("f32[]", "all-reduce")}, native=False)
    expect(
        shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec), set(), native=not isinstance(status(), str)
    )


def layers():
    """A layer that is the same on all devices: its gradient is the sum over what each of them has of the batch."""
    layer = pa.MultiHeadAttention(8, 2, backend="jax")
    x = rng.standard_normal((4, 6, 8)).astype(np.float32)
    there = layer.to("numpy")
    y, cache = there.forward(x)
    inputs, grads = there.backward(2 * y, cache)
    everywhere, divided = put(layer, P()), put(x, P("data"))

    def loss(layer, x):
        return jnp.sum(layer(x) ** 2)

    def of_each(layer, x):
        return jax.lax.psum(loss(layer, x), "data")

    mapped = shard_map(of_each, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    for function in (loss, mapped):
        dlayer, dx = jax.jit(jax.grad(function, argnums=(0, 1)))(everywhere, divided)
        assert dx.sharding.spec == P("data"), dx.sharding
        close(dx, inputs.query)
        for name, dparameter in dlayer.parameters().items():
            close(dparameter, grads[name])
    within = shard_map(jax.grad(of_each), mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    for name, dparameter in jax.jit(within)(everywhere, divided).parameters().items():
        close(dparameter, grads[name])


def explicit_axes():
    """Attention says what to do instead of leaving it to the types of its loops; in ``shard_map`` it computes."""
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    explicit = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"), axis_types=kinds)
    x = rng.standard_normal((4, 2, 3, 4)).astype(np.float32)
    there, spec = jax.device_put(x, NamedSharding(explicit, P("data", "model"))), P("data", "model")
    for call in (pa.attention, jax.jit(pa.attention)):
        with pytest.raises(pa.BackendMismatchError, match=r"q: expected an array on one device.*shard_map"):
            call(there, there, there)
    mapped = shard_map(pa.attention, mesh=explicit, in_specs=(spec,) * 3, out_specs=spec)
    close(jax.jit(mapped)(there, there, there), pa.attention(x, x, x))


{"attention": attention, "layers": layers, "explicit_axes": explicit_axes}[sys.argv[1]]()
