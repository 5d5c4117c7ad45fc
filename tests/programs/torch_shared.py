"""Attention on a shared sequence, in groups of 1, 2, 3 and 4 of four processes of gloo; prints what was found as JSON.

``torch_shared.py``: ``equal`` has the difference from one process of each case, relative to the largest number,
``bytes`` what a rank of each group sent and what the formula says, ``refused`` the messages where a rank had other or
bad arguments, and ``dtensors`` the placements of a result.
"""

import contextlib
import datetime
import json
import os
import tempfile

import torch
from torch import distributed
from torch.distributed.tensor import Shard, init_device_mesh

import polyattn as pa
from polyattn.distributed.torch import attention, positions, shard, unshard

GROUPS = {1: [2], 2: [3, 1], 3: [0, 2, 3], 4: [0, 1, 2, 3]}
SIZES = {"heads": 4, "kv_heads": 4, "n_q": 37, "n_k": 37, "d_k": 6, "d_v": 5}
UNEVEN = {1: [37], 2: [30, 7], 3: [9, 0, 28], 4: [1, 22, 0, 14]}


def cases():
    """Return the arguments of each case, changes of the sizes, and a factor of q."""
    ids = torch.tensor([0] * 11 + [1] * 15 + [2] * 11)
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (9, 2), "scale": 0.3},
        "causal window": {"causal": True, "window": (5, None)},
        "lengths": {"key_lengths": torch.tensor([20, 37])},
        "one length": {"key_lengths": 13, "causal": True},
        "segments": {"segment_ids": (ids, ids), "causal": True},
        "dropout": {"dropout": 0.3, "seed": 2**40 + 5, "causal": True},
        "softcap": {"softcap": 1.5},
        "sinks": {"sinks": torch.tensor([0.3, -torch.inf, 2.0, -1.0], dtype=torch.float64), "key_lengths": 9},
        "alibi": {"bias": pa.alibi_bias(4), "causal": True},
        "groups": {"causal": True, "sizes": {"heads": 8, "kv_heads": 4}},
        "more keys": {"causal": True, "sizes": {"n_q": 20}},
        "first queries": {"causal": True, "q_offset": 3, "sizes": {"n_q": 20}},
        "empty rows": {"causal": True, "q_offset": -8},
        "large scores": {"causal": True, "factor": 300.0},
        "large scores, dropout": {"dropout": 0.3, "seed": 1, "window": (30, 5), "factor": 300.0},
    }


def pieces(n, lengths, layout):
    """Return the positions of each rank, as the documentation of the layouts says."""
    if layout == "contiguous":
        return list(torch.arange(n).split(lengths))
    halves = [-(-m // 2) for m in lengths] + [m // 2 for m in reversed(lengths)]
    spans = torch.arange(n).split(halves)
    return [torch.cat([spans[r], spans[-1 - r]]) for r in range(len(lengths))]


def shares(n, ranks, even):
    if even:
        return None
    found = [length * n // 37 for length in UNEVEN[ranks]]
    found[-1] += n - sum(found)
    return found


def difference(got, want, at=None):
    """Return the largest difference from the positions ``at`` of what one process finds, relative to its largest."""
    here = want if at is None else want[..., at, :]
    return float((got - here).abs().max() / want.abs().max()) if here.numel() else 0.0


def compare(group, ranks, rank, method, layout, even, given):
    """Return the largest difference of result and gradients from those of one process."""
    arguments = dict(given)
    factor, sizes = arguments.pop("factor", 1.0), SIZES | arguments.pop("sizes", {})
    rng = torch.Generator().manual_seed(1)
    shapes = [("heads", "n_q", "d_k"), ("kv_heads", "n_k", "d_k"), ("kv_heads", "n_k", "d_v"), ("heads", "n_q", "d_v")]
    q, k, v, dout = (torch.randn(2, *(sizes[i] for i in s), dtype=torch.float64, generator=rng) for s in shapes)
    q, parameters = q * factor, {}
    if "sinks" in arguments:
        parameters["sinks"] = arguments.pop("sinks")
    if method == "table":
        method, parameters["table"] = "ring", torch.randn(8, 4, dtype=torch.float64, generator=rng)

    def call(function, q, k, v, sinks=None, table=None, **more):
        bias = arguments.get("bias") if table is None else pa.relative_position_bias(table)
        return function(q, k, v, **{**arguments, **more, "sinks": sinks, "bias": bias})

    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    known = {name: x.clone().requires_grad_() for name, x in parameters.items()}
    want = call(pa.attention, *inputs, **known)
    want.backward(dout)
    wanted = [want, *(x.grad for x in inputs)]

    places = {}
    for n in (sizes["n_q"], sizes["n_k"]):
        lengths = shares(n, ranks, even)
        own = positions(n, group=group, layout=layout) if even else pieces(n, lengths, layout)[rank]
        places[n] = own
    at_q, at_k = places[sizes["n_q"]], places[sizes["n_k"]]
    local = [x[..., at, :].clone().requires_grad_() for x, at in ((q, at_q), (k, at_k), (v, at_k))]
    mine = {name: x.clone().requires_grad_() for name, x in parameters.items()}
    if "segment_ids" in arguments:
        ids = arguments["segment_ids"]
        arguments["segment_ids"] = (ids[0][at_q], ids[1][at_k])
    got = call(attention, *local, **mine, group=group, method=method, layout=layout)
    got.backward(dout[..., at_q, :])
    found = [got.detach(), *(x.grad for x in local)]
    places = (at_q, at_q, at_k, at_k)
    errors = [difference(a, b.detach(), at) for a, b, at in zip(found, wanted, places, strict=True)]
    errors.append(difference(unshard(got, group=group, layout=layout), want.detach()))
    for name, x in mine.items():  # the gradient of what all ranks have is the sum over them
        distributed.all_reduce(x.grad, group=group)
        errors.append(difference(x.grad, known[name].grad))
    return max(errors)


def equal(group, ranks, rank):
    found = {}
    for method in ("ring", "all-to-all"):
        for layout, even in (("contiguous", True), ("contiguous", False), ("zigzag", True), ("zigzag", False)):
            kinds = cases() if layout == "contiguous" or not even else {"causal": {"causal": True}}
            for name, given in kinds.items() if method == "ring" or 4 % ranks == 0 else ():
                key = f"{ranks} {method} {layout} {'even' if even else 'uneven'}: {name}"
                found[key] = compare(group, ranks, rank, method, layout, even, given)
    for layout in ("contiguous", "zigzag"):
        found[f"{ranks} ring {layout}: table"] = compare(group, ranks, rank, "table", layout, False, {"causal": True})
    return found


@contextlib.contextmanager
def counted():
    """Count the bytes that leave this process for another one in attention."""
    found, own = {"sent": 0}, distributed.get_rank()
    operation, exchange = distributed.P2POp, distributed.all_to_all_single

    def counting(call, x, *arguments):
        found["sent"] += x.nbytes if call is distributed.isend else 0
        return operation(call, x, *arguments)

    def counting_exchange(to, x, to_sizes, sizes, group):
        found["sent"] += x.nbytes - sizes[distributed.get_group_rank(group, own)] * x.element_size()
        return exchange(to, x, to_sizes, sizes, group=group)

    distributed.P2POp, distributed.all_to_all_single = counting, counting_exchange
    try:
        yield found
    finally:
        distributed.P2POp, distributed.all_to_all_single = operation, exchange


def sent(group, ranks, rank):
    """Return the bytes that were sent in a forward and a backward, and those that the formulas say."""
    found, lengths = {}, [32 + 4 * r for r in range(ranks)]
    n, mine = sum(lengths), lengths[rank]
    heads, kv_heads, d_k, d_v, size = 4, 4, 6, 5, 8
    q, k, v = (torch.ones(2, 4, mine, d, dtype=torch.float64, requires_grad=True) for d in (d_k, d_k, d_v))
    for method in ("ring", "all-to-all"):
        if method == "all-to-all" and 4 % ranks:
            continue
        with counted() as forward:
            out = attention(q, k, v, group=group, method=method)
        with counted() as backward:
            out.sum().backward()
        each = 2 * size * kv_heads * (d_k + d_v)  # of a position
        if method == "ring":  # all shards but the next rank's; their gradients, all but this rank's
            formula = [each * (n - lengths[(rank + 1) % ranks])]
            formula.append(formula[0] + each * (n - mine) if ranks > 1 else 0)
            formula[0] = formula[0] if ranks > 1 else 0
        else:
            there = 2 * size * (heads * d_k + each // (2 * size)) * mine * (ranks - 1) // ranks
            back = 2 * size * heads * d_v * (n - mine) // ranks
            grads = 2 * size * (heads * d_k + each // (2 * size)) * (n - mine) // ranks
            formula = [there + back, 2 * size * heads * d_v * mine * (ranks - 1) // ranks + grads]
        found[f"{ranks} {method}"] = [[forward["sent"], backward["sent"]], formula]
    return found


def refused(group, rank):
    """Return what each of two ranks is told where the second one has other or bad arguments."""

    def arguments(**second):
        given = {"q": torch.ones(1, 4, 6, 8), "k": torch.ones(1, 4, 6, 8), "v": torch.ones(1, 4, 6, 8)}
        return given | (second if rank == 1 else {})

    ones, found = torch.ones, {}
    for name, given in {
        "dtype": arguments(q=ones(1, 4, 6, 8).double(), k=ones(1, 4, 6, 8).double(), v=ones(1, 4, 6, 8).double()),
        "heads": arguments(k=ones(1, 2, 6, 8), v=ones(1, 2, 6, 8)),
        "batch": arguments(q=ones(3, 4, 6, 8)),
        "causal": arguments(causal=True),
        "scale": arguments(scale=0.5),
        "seed": arguments(dropout=0.5, seed=7),
        "lengths": arguments(key_lengths=ones(1, dtype=torch.int64)),
        "method": arguments(method="all-to-all"),
        "layout": arguments(layout="zigzag"),
        "segments": arguments(segment_ids=(ones(6, dtype=torch.int32),) * 2),
        "bad shape": arguments(v=ones(1, 4, 5, 8)),
        "bad array": arguments(q=[[1.0]]),
        "bad window": arguments(window=3),
        "bad layout": arguments(layout="snake"),
        "mask": {**arguments(), "mask": ones(6, 6, dtype=torch.bool)},
        "array bias": {**arguments(), "bias": ones(6, 6)},
        "no keys": {**arguments(), "k": ones(1, 4, 0, 8), "v": ones(1, 4, 0, 8)},
        "too long": {**arguments(), "key_lengths": 13},
        "three heads": {"q": ones(1, 3, 6, 8), "k": ones(1, 3, 6, 8), "v": ones(1, 3, 6, 8), "method": "all-to-all"},
    }.items():
        inputs = [given.pop(x) for x in "qkv"]
        try:
            attention(*inputs, group=group, **given)
            found[name] = None
        except pa.PolyattnError as error:
            found[name] = f"{type(error).__name__}: {error}"
    x = torch.ones(1, 2, 4, 8, requires_grad=True)
    try:
        torch.autograd.grad(attention(x, x, x, group=group).sum(), x, create_graph=True)
    except pa.PolyattnError as error:
        found["second order"] = f"{type(error).__name__}: {error}"
    distributed.barrier(group=group)
    return found


def dtensors(rank):
    """Return what a DTensor result is, how far it is off, and the errors for a wrong mesh and a mixed call."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("context",))
    rng = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 11, 4, dtype=torch.float64, generator=rng) for _ in range(3))
    shards = [distributed.tensor.distribute_tensor(x, mesh, [Shard(2)]).requires_grad_() for x in (q, k, v)]
    out = attention(*shards, causal=True)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    want = pa.attention(*inputs, causal=True)
    (want**2).sum().backward()
    (out**2).sum().backward()
    errors = [difference(out.full_tensor().detach(), want.detach())]
    errors += [difference(a.grad.full_tensor(), b.grad) for a, b in zip(shards, inputs, strict=True)]
    local = [shard(x, group=mesh) for x in (q, k, v)]
    errors.append(difference(unshard(attention(*local, group=mesh, causal=True), group=mesh), want.detach()))
    wide = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    messages = []
    for call in (lambda: attention(*local, group=wide), lambda: attention(shards[0], k, v)):
        try:
            call()
        except pa.PolyattnError as error:
            messages.append(str(error))
    return {"placements": str(out.placements), "shape": list(out.shape), "error": max(errors), "messages": messages}


def work(rank, meeting, result):
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=4, timeout=datetime.timedelta(seconds=60)
    )
    torch.set_num_threads(1)
    found = {"equal": {}, "bytes": {}, "refused": {}}
    for ranks, members in GROUPS.items():
        group = distributed.new_group(members)
        if rank in members:
            own = distributed.get_rank(group)
            found["equal"] |= equal(group, ranks, own)
            found["bytes"] |= {f"{name} rank {own}": x for name, x in sent(group, ranks, own).items()}
            if ranks == 2:
                found["refused"] = {f"rank {own}": refused(group, own)}
    found["dtensors"] = dtensors(rank)
    everyone = [None] * 4
    distributed.all_gather_object(everyone, found)
    if rank == 0:
        merged = {"equal": {}, "bytes": {}, "refused": {}, "dtensors": everyone[0]["dtensors"]}
        for each in everyone:
            for key, error in each["equal"].items():
                merged["equal"][key] = max(error, merged["equal"].get(key, 0.0))
            merged["bytes"] |= each["bytes"]
            merged["refused"] |= each["refused"]
        with open(result, "w") as file:
            json.dump(merged, file)
    distributed.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "found.json")
        torch.multiprocessing.spawn(work, (os.path.join(folder, "meeting"), result), 4)
        with open(result) as file:
            print(file.read())
