"""Attention over a mesh axis of 2, 4 and 8 host devices, in one process or in two of ``jax.distributed``.

``jax_shared.py`` prints as JSON the difference from one device of results, gradients and tangents, relative to the
largest number, and the collectives of the compiled programs. ``jax_shared.py RANK ADDRESS`` is one of two processes.
"""

import json
import re
import sys

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import polyattn as pa
from polyattn.distributed.jax import attention, positions

IDS = np.repeat([0, 1, 2], [20, 31, 13]).astype(np.int32)
CASES = {
    "2 contiguous: lengths, large scores": {"key_lengths": np.asarray([20, 64]), "factor": 300.0},
    "4 zigzag: causal window, sinks, softcap, segments, groups": {
        "causal": True, "window": (40, None), "sinks": np.asarray([0.3, -1.0, 2.0, 0.0]), "softcap": 1.5,
        "segment_ids": (IDS, IDS), "kv_heads": 2,
    },
    "4 contiguous: dropout, table": {"dropout": 0.3, "seed": 2**40 + 5, "table": True, "causal": True},
    "8 zigzag: causal": {"causal": True},
}  # fmt: skip


def difference(got, want):
    return float(np.abs(np.asarray(got) - np.asarray(want)).max() / np.abs(np.asarray(want)).max())


def travels(compiled):
    """Return the collectives of a compiled program, with the shapes of their results."""
    return sorted(set(re.findall(r"= (\S+) (all-\w+|collective-permute|reduce-scatter)[(.]", compiled.as_text())))


def problem(given, n=64, d=8):
    arguments = dict(given)
    rng = np.random.default_rng(0)
    kv_heads, factor = arguments.pop("kv_heads", 4), arguments.pop("factor", 1.0)
    q, k, v = (rng.standard_normal((2, heads, n, d)) for heads in (4, kv_heads, kv_heads))
    inputs = {"q": q * factor, "k": k, "v": v}
    if "sinks" in arguments:
        inputs["sinks"] = arguments.pop("sinks")
    if arguments.pop("table", False):
        inputs["table"] = rng.standard_normal((8, 4))
    moved = {name: rng.standard_normal(x.shape) for name, x in inputs.items()}
    return inputs, moved, rng.standard_normal(q.shape), arguments


def calling(function, arguments, **more):
    def call(inputs):
        x = dict(inputs)
        bias = pa.relative_position_bias(x.pop("table")) if "table" in x else None
        q, k, v = (x.pop(name) for name in "qkv")
        return function(q, k, v, **x, bias=bias, **arguments, **more)

    return call


def at_jax(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def check(name, given):
    """Return the differences of one case, and the collectives of forward, backward and tangents."""
    (size, layout), n = name.partition(":")[0].split(), 64
    inputs, moved, dout, arguments = problem(given, n)
    mesh = Mesh(np.array(jax.devices()[: int(size)]), ("context",))
    order = positions(n, int(size), layout)

    def ordered(x):
        return {key: jnp.asarray(y if key in ("sinks", "table") else y[..., order, :]) for key, y in x.items()}

    arguments = {key: x if key == "window" else jax.tree.map(at_jax, x) for key, x in arguments.items()}
    alone = jax.tree.map(jnp.asarray, inputs)
    want = calling(pa.attention, arguments)(alone)
    grads = jax.vjp(calling(pa.attention, arguments), alone)[1](jnp.asarray(dout))[0]
    want_dot = jax.jvp(calling(pa.attention, arguments), (alone,), (jax.tree.map(jnp.asarray, moved),))[1]
    if "segment_ids" in arguments:
        arguments["segment_ids"] = tuple(ids[order] for ids in arguments["segment_ids"])
    shared = calling(attention, arguments, mesh=mesh, axis="context", layout=layout)
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "context"))
    here = {k: jax.device_put(x, sharding if k in "qkv" else NamedSharding(mesh, PartitionSpec()))
            for k, x in ordered(inputs).items()}  # fmt: skip

    def backward(x, dout):
        return jax.vjp(shared, x)[1](dout)[0]

    def forward_mode(x, x_dot):
        return jax.jvp(shared, (x,), (x_dot,))

    calls = {"forward": (shared, here), "backward": (backward, here, jnp.asarray(dout[..., order, :])),
             "tangents": (forward_mode, here, ordered(moved))}  # fmt: skip
    compiled = {kind: jax.jit(call).lower(*xs).compile() for kind, (call, *xs) in calls.items()}
    out = compiled["forward"](here)
    found = compiled["backward"](*calls["backward"][1:])
    _, out_dot = compiled["tangents"](*calls["tangents"][1:])
    errors = {"out": difference(out, want[..., order, :]), "tangents": difference(out_dot, want_dot[..., order, :])}
    for key, dx in found.items():
        errors[key] = difference(dx, grads[key] if key in ("sinks", "table") else grads[key][..., order, :])
    assert out.sharding.is_equivalent_to(sharding, 4), out.sharding
    return {"errors": errors, "collectives": {kind: travels(program) for kind, program in compiled.items()}}


def of_two(rank, address):
    """Compare the rows of this process with those of one device; two processes with two devices each."""
    jax.distributed.initialize(address, 2, rank)
    inputs, _, dout, arguments = problem({"causal": True})
    mesh, spec = Mesh(np.array(jax.devices()), ("context",)), PartitionSpec(None, None, "context")
    order = positions(64, 4, "zigzag")
    put = {
        name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at, x=x: x[..., order, :][at])
        for name, x in {**inputs, "dout": dout}.items()
    }
    shared = calling(attention, arguments, mesh=mesh, axis="context", layout="zigzag")

    def both(x, dout):
        out, pull = jax.vjp(shared, x)
        return {"out": out, **pull(dout)[0]}

    found = jax.jit(both)({name: put[name] for name in "qkv"}, put["dout"])
    out, cache = pa.attention_forward(*(inputs[name] for name in "qkv"), causal=True)
    want = {"out": out, **pa.attention_backward(dout, cache)._asdict()}
    errors = {}
    for name, x in found.items():
        shards = x.addressable_shards
        assert len(shards) == 2, shards
        errors[name] = max(difference(s.data, want[name][..., order, :][s.index]) for s in shards)
    jax.distributed.shutdown()
    return errors


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if len(sys.argv) > 1:
        print(json.dumps(of_two(int(sys.argv[1]), sys.argv[2])))
    else:
        print(json.dumps({name: check(name, given) for name, given in CASES.items()}))
