"""Blocks of an attention problem, at any place and of some heads: joined, they are the whole problem."""

import itertools

import numpy as np

import polyattn as pa
from polyattn import registry
from polyattn.distributed import _block as block
from polyattn.distributed._block import Span
from polyattn.functional._arguments import checked_call, make_problem
from polyattn.testing import assert_close
from polyattn.testing.features import lacking
from polyattn.testing.plugin import TARGET

QUERIES, KEYS = (0, 5, 13), (0, 6, 7, 18)
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window": (4, 2), "softcap": 2.0},
    "dropout": {"dropout": 0.4, "seed": 3, "causal": True},
    "sinks, lengths": {"sinks": True, "key_lengths": 9},
    "alibi": {"bias": pa.alibi_bias(4), "causal": True},
}


def pytest_generate_tests(metafunc):
    if "factor" in metafunc.fixturenames:
        # Where each case compiles several programs, one stands for all.
        compiles = lacking(metafunc.config.stash[TARGET], "any_shape")
        metafunc.parametrize("factor", [1.0] if compiles else [1.0, 200.0])
        metafunc.parametrize("name", ["dropout"] if compiles else list(CASES))


def test_joined_blocks_are_the_whole(name, factor, make, to_np, backend, tiles):
    tiles(3, 4)
    rng = np.random.default_rng(0)
    q, k, v, dout = (make(rng.standard_normal((2, 4, n, 6)) * f) for n, f in ((13, factor), (18, 1), (18, 1), (13, 1)))
    arguments = dict(CASES[name])
    if "sinks" in arguments:
        arguments["sinks"] = make(rng.standard_normal(4))
    want, cache = pa.attention_forward(q, k, v, **arguments)
    grads = pa.attention_backward(dout, cache)

    native = registry.ready(backend)
    arrays, options = checked_call(q, k, v, **arguments)
    own = {name: x for name, x in arrays.items() if name not in "qkv"}
    problem = make_problem(native, q, native.device_of(q), **own, **{x: y for x, y in options.items() if x != "kernel"})
    spans = [[Span(a, b - a) for a, b in itertools.pairwise(ends)] for ends in (QUERIES, KEYS)]
    found = {"out": np.zeros(want.shape), "q": np.zeros(q.shape), "k": np.zeros(k.shape), "v": np.zeros(v.shape)}
    dsinks = 0
    with native.scope():
        for query in spans[0]:
            rows = slice(query.start, query.start + query.length)
            q_t, dout_t, parts = q[:, :, rows, :], dout[:, :, rows, :], []
            result = None if problem.sinks is None else block.without_keys(q_t, v, problem)
            for key in spans[1]:
                part = block.block_of(problem, query, key)
                if part is not None:
                    columns = slice(key.start, key.start + key.length)
                    parts.append((part, columns))
                    k_t, v_t = k[:, :, columns, :], v[:, :, columns, :]
                    result = block.joined(problem, result, block.forward(q_t, k_t, v_t, part))
            found["out"][:, :, rows] = to_np(result.out)
            for part, columns in parts:
                k_t, v_t = k[:, :, columns, :], v[:, :, columns, :]
                now = block.backward(dout_t, q_t, k_t, v_t, result.out, result.statistics, part)
                found["q"][:, :, rows] += to_np(now.q)
                found["k"][:, :, columns] += to_np(now.k)
                found["v"][:, :, columns] += to_np(now.v)
            if problem.sinks is not None:
                dsinks = dsinks + to_np(block.sinks_gradient(dout_t, result.out, result.statistics, problem))
    assert_close(found["out"], to_np(want), what="out")
    for name in "qkv":
        assert_close(found[name], to_np(getattr(grads, name)), what=f"d{name}")
    if problem.sinks is not None:
        assert_close(dsinks, to_np(grads.sinks), what="dsinks")


def test_excluded_blocks_are_not_computed(make, backend):
    native, q = registry.ready(backend), make(np.zeros((1, 1, 8, 2)))
    _, options = checked_call(q, q, q, causal=True, window=(3, 0), key_lengths=6)
    del options["kernel"]
    problem = make_problem(native, q, native.device_of(q), **options)

    def block_of(query, key):
        return block.block_of(problem, Span(query, 2), Span(key, 2))

    assert block_of(0, 2) is None  # after the queries
    assert block_of(6, 0) is None  # before the window
    assert block_of(6, 6) is None  # past the length
    assert block_of(4, 2).causal is False  # no pair is excluded
    assert block_of(4, 2).key_lengths is None
    assert block_of(4, 4).causal is True


def test_dropout_of_some_heads(make, to_np, backend):
    """A part of the heads with their numbers in the whole has the bits of the whole."""
    native = registry.ready(backend)
    rng = np.random.default_rng(0)
    q, k, v = (make(rng.standard_normal((2, 4, 7, 6))) for _ in range(3))
    want = to_np(pa.attention(q, k, v, dropout=0.5, seed=9))
    some = [x[:, 1:3, ...] for x in (q, k, v)]
    _, options = checked_call(*some, dropout=0.5, seed=9)
    del options["kernel"]
    numbers = native.asarray(np.asarray([1, 2, 5, 6], dtype=np.int32))
    problem = make_problem(native, q, native.device_of(q), rows=7, numbers=numbers, **options)
    with native.scope():
        found = block.forward(*some, problem)
    assert_close(to_np(found.out), want[:, 1:3])
