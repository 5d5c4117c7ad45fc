"""Structured biases and masks on the tiled kernel: every case in small tiles, what is skipped, how much memory."""

import tracemalloc

import numpy as np
import pytest
from small_tiles import tiled_problem

import polyattn as pa
from polyattn.kernels import StructuredBias, StructuredMask, candidates
from polyattn.kernels._tiled import loops
from polyattn.testing import assert_close
from polyattn.testing.conformance.test_structure import CASES, HEADS, TABLE, compare, problem_of, published_bucket
from polyattn.testing.features import lacking
from polyattn.testing.plugin import TARGET
from polyattn_numpy import _layout


def pytest_generate_tests(metafunc):
    """Skip small tiles if the library compiles each loop over them: the kit has one such case."""
    cases = {"name": [*CASES], "kind": ["alibi", "relative", "blocks", "prefix"]}
    for argument in {*cases} & {*metafunc.fixturenames}:
        none = [pytest.param(None, marks=pytest.mark.needs("any_shape"))]
        metafunc.parametrize(argument, none if lacking(metafunc.config.stash[TARGET], "any_shape") else cases[argument])


@pytest.fixture
def tiny(monkeypatch, tiles):
    """Make tiles that end within blocks, prefix and problem."""
    tiles(4, 8)
    for constant, value in (("ROWS", 5), ("COLUMNS", 8), ("SCORES", 40)):
        monkeypatch.setattr(_layout, constant, value)


def test_every_case_and_kernel(name, tiny, backend, contract, make, to_np):
    problem, ran = problem_of(name), []
    for kernel in {kernel.name for kernel in candidates(contract.kernels)}:
        try:
            ran.append(compare(problem, make, to_np, kernel))
        except pa.KernelUnsupportedError:  # the kernel does not know this structure
            continue
    assert {"tiled", "plain"} <= {*ran}
    assert ("blocked" in ran) == (backend == "numpy" and name.startswith("alibi"))


def visited(n, **arguments):
    """Return the first query and key of each tile that is computed, and those of the tiles without a mask."""
    x = np.ones((1, n, 4))
    problem = tiled_problem(x, x, tile=(4, 4), **arguments)
    every = [(tuple(tile), loop.whole) for loop in loops(problem) for tile in loop.tiles]
    return {tile for tile, _ in every}, {tile for tile, whole in every if whole}


def test_tiles_without_an_allowed_block_are_skipped():
    blocks = np.zeros((4, 4), dtype=bool)
    blocks[0, 0] = blocks[1, 2] = blocks[3, 3] = True
    assert visited(16, mask=pa.block_mask(blocks, 4)) == ({(0, 0), (4, 8), (12, 12)},) * 2
    some, whole = visited(32, mask=pa.block_mask(blocks, 8), causal=True)
    assert some == {(0, 0), (4, 0), (4, 4), (24, 24), (28, 24), (28, 28)}
    assert whole == {(4, 0), (28, 24)}
    half = visited(16, mask=pa.block_mask(np.kron(blocks, np.eye(2, dtype=bool)), 2))
    assert half == ({(0, 0), (4, 8), (12, 12)}, set())


def test_tiles_after_prefix_and_query_are_skipped():
    some, whole = visited(16, mask=pa.prefix_mask(4))
    causal, _ = visited(16, causal=True)
    assert some == causal
    assert whole == {(i, j) for i, j in causal if j == 0 or j < i}
    some, whole = visited(16, mask=pa.prefix_mask(16))
    assert some == whole
    assert len(whole) == 16
    diagonal = pa.block_mask(np.eye(4, dtype=bool), 4)
    some, whole = visited(16, mask=pa.prefix_mask(9) & diagonal)
    assert some == {(0, 0), (4, 4), (8, 8), (12, 12)}
    assert whole == {(0, 0), (4, 4)}


def test_a_tile_is_no_larger_than_a_few_blocks():
    assert pa.block_mask(np.ones((1, 1), dtype=bool), (16, 100)).tile_lengths(1024, 1024) == (64, 100)
    assert pa.block_mask(np.ones((1, 1), dtype=bool), 33).tile_lengths(1024, 128) == (132, 128)


class Seen:
    """A record of the tiles that were computed, and the size of the largest."""

    def __init__(self, monkeypatch):
        self.largest = 0
        for kind in (*StructuredBias.__subclasses__(), *StructuredMask.__subclasses__()):
            monkeypatch.setattr(kind, "pairs", self.watched(kind.pairs))

    def watched(self, pairs):
        def watch(structure, problem):
            result = pairs(structure, problem)
            self.largest = max(self.largest, int(np.prod(result.shape)))
            return result

        return watch


def test_no_more_than_a_tile_is_ever_computed(kind, monkeypatch, tiles, make):
    tiles(8, 16)
    x = make(np.ones((HEADS, 32, 4)))
    arguments = {
        "alibi": lambda: {"bias": pa.alibi_bias(HEADS)},
        "relative": lambda: {"bias": pa.relative_position_bias(make(TABLE))},
        "blocks": lambda: {"mask": pa.block_mask(np.tri(4, dtype=bool), 8)},
        "prefix": lambda: {"mask": pa.prefix_mask(20)},
    }[kind]()
    seen = Seen(monkeypatch)
    pa.attention_backward(x, pa.attention_forward(x, x, x, kernel="tiled", **arguments)[1])
    assert 0 < seen.largest <= HEADS * 8 * 16


def test_memory_is_linear():
    """4096 × 4096 booleans are 16 MiB, floats 64 MiB; forward and backward need less than either."""
    n = 4096
    x = np.random.default_rng(0).standard_normal((1, n, 4)).astype(np.float32)
    table = np.random.default_rng(1).standard_normal((8, 1)).astype(np.float32)
    mask = pa.block_mask(np.eye(16, dtype=bool) | np.eye(16, k=-3, dtype=bool), n // 16)
    for bias in (pa.alibi_bias(1), pa.relative_position_bias(table)):
        tracemalloc.start()
        _, cache = pa.attention_forward(x, x, x, bias=bias, mask=mask)
        pa.attention_backward(x, cache)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert cache.kernel in ("native", "tiled")
        assert peak < 2**23


@pytest.mark.parametrize(
    ("bidirectional", "buckets", "far"), [(True, 8, 11), (False, 5, 100), (True, 4, 2), (False, 64, 1000)]
)
def test_other_buckets(make, to_np, bidirectional, buckets, far):
    q, k, table = np.zeros((401, 1)), np.zeros((1, 1)), np.arange(float(buckets))[:, None]
    bias = pa.relative_position_bias(make(table), bidirectional=bidirectional, max_distance=far)
    _, cache = pa.attention_forward(make(q), make(k), make(k), bias=bias, q_offset=-200)
    expected = published_bucket(-(np.arange(401) - 200), bidirectional, buckets, far)
    np.testing.assert_allclose(to_np(cache.lse), expected, atol=1e-9)


@pytest.mark.needs("autograd")
def test_the_library_s_own_differentiation_reaches_the_table(backend):
    problem = problem_of("relative")

    def loss(table, convert, dout):
        given = {"bias": pa.relative_position_bias(table, max_distance=5)}
        return (pa.attention(*map(convert, problem.inputs), **given) * dout).sum()

    if backend == "torch":
        import torch

        table = torch.tensor(TABLE, requires_grad=True)
        loss(table, torch.as_tensor, torch.as_tensor(problem.dout)).backward()
        slope = table.grad.numpy()
    else:
        import jax

        slope = np.asarray(jax.grad(loss)(jax.numpy.asarray(TABLE), jax.numpy.asarray, problem.dout))
    assert_close(slope, problem._replace(dlse=0 * problem.dlse).slopes()[3])
