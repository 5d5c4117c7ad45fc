"""The tiled kernel with tiles so small that every problem has many, against the reference."""

import numpy as np
import pytest
from small_tiles import tiled_problem

import polyattn as pa
from polyattn.kernels import TiledKernel, _tiled
from polyattn.kernels._tiled import Tile, loops
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES
from polyattn.testing.features import lacking, need
from polyattn.testing.plugin import TARGET


@pytest.fixture
def tiny(tiles):
    """Make tiles of at most 2 queries and 4 keys: 5 × 7 scores are six tiles of four shapes."""
    tiles(2, 4)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        # Where each case compiles several programs, two stand for all.
        compiles = lacking(metafunc.config.stash[TARGET], "any_shape")
        cases = [case for case in CASES if not compiles or case.name in ("plain", "everything")]
        metafunc.parametrize("case", cases, ids=[case.name for case in cases])


def test_every_case(case, tiny, make, to_np):
    problem = case.problem()
    inputs, arguments = problem.native(make, "float64")
    out, cache = pa.attention_forward(*inputs, kernel="tiled", **arguments)
    grads = pa.attention_backward(make(problem.dout), cache, make(problem.dlse))
    expected = ref.attention(*problem.inputs, **problem.arguments)
    slopes = ref.attention_gradients(problem.dout, *problem.inputs, **{"dlse": problem.dlse, **problem.arguments})
    assert cache.kernel == "tiled"
    assert_close(to_np(out), expected.out.reshape(problem.dout.shape), what="out")
    assert_close(to_np(cache.lse), expected.lse.reshape(problem.dlse.shape), what="lse")
    for name, gradient in zip(grads._fields, grads, strict=True):
        if gradient is not None:
            assert_close(to_np(gradient), np.reshape(getattr(slopes, name), gradient.shape), what=f"gradient of {name}")


@pytest.mark.parametrize("seed", [3, -(2**40)])
def test_dropout_is_the_same_in_every_tiling(tiny, make, to_np, seed):
    rng = np.random.default_rng(0)
    hosts = [rng.standard_normal((2, 3, n, 4)) for n in (5, 11, 11)]
    dout = make(rng.standard_normal((2, 3, 5, 4)))
    results = []
    for kernel in ("plain", "tiled"):
        out, cache = pa.attention_forward(*map(make, hosts), dropout=0.5, seed=seed, kernel=kernel)
        results.append([to_np(x) for x in (out, *pa.attention_backward(dout, cache)[:3])])
    for plain, tiled in zip(*results, strict=True):
        assert_close(tiled, plain)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_excluded_keys_reach_nothing_across_tiles(tiny, make, to_np, poison):
    rng = np.random.default_rng(1)
    q, k, v, dout = (rng.standard_normal((1, 5, 4)) for _ in range(4))
    results = []
    for value in (0.0, poison):
        k[:, 3], v[:, 3] = value, value  # seen by queries 3 and 4 alone
        out, cache = pa.attention_forward(*(make(x) for x in (q, k, v)), causal=True, kernel="tiled")
        grads = pa.attention_backward(make(dout), cache)
        results.append((to_np(out)[:, :3], to_np(grads.q)[:, :3]))
    for clean, dirty in zip(*results, strict=True):
        np.testing.assert_array_equal(dirty, clean)
    assert np.isnan(to_np(out)[:, 3:]).any()


def test_low_precision_is_summed_wide(tiny, target, make, to_np):
    for dtype in target.dtypes:
        ones = make(np.ones((1, 96, 4)), dtype)
        out, cache = pa.attention_forward(ones, ones, ones, kernel="tiled")
        grads = pa.attention_backward(ones, cache)
        assert out.dtype == ones.dtype
        np.testing.assert_allclose(np.asarray(to_np(grads.v), dtype=np.float64), 1.0, rtol=4e-3)


@pytest.mark.parametrize(("dtype", "rounding"), [("float16", 2**-11), ("bfloat16", 2**-8)])
def test_the_gradient_of_a_low_precision_bias_is_rounded_once(tiny, target, make, to_np, dtype, rounding):
    need(target, dtype)
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 64, 4)).astype(np.float32)
    bias = make(rng.integers(-8, 8, 64) / 8, dtype)
    _, cache = pa.attention_forward(*(make(x, "float32") for x in (q, k, v)), bias=bias, kernel="tiled")
    dbias = to_np(pa.attention_backward(make(dout, "float32"), cache).bias)
    want = ref.attention_gradients(*(x.astype(np.float64) for x in (dout, q, k, v)), bias=to_np(bias)).bias
    np.testing.assert_allclose(dbias, want, rtol=1.01 * rounding, atol=1e-5)


@pytest.mark.parametrize("score", [1e5, -2e9, 1e30, np.finfo(np.float32).min])
def test_large_scores_share_as_small_ones_do(tiny, make, to_np, score):
    """Five equal keys in tiles of four and one: the log-sum-exp of large scores has no digits left for log 5."""
    q, k, v = np.zeros((1, 3, 2)), np.zeros((1, 5, 2)), np.arange(5.0).reshape(1, 5, 1)
    bias = make(np.full((3, 5), score), "float32")
    out = pa.attention(*(make(x, "float32") for x in (q, k, v)), bias=bias, kernel="tiled")
    assert_close(to_np(out), np.full((1, 3, 1), 2.0), "float32")


def test_a_tile_of_scores_that_are_minus_infinity(tiny, make, to_np):
    """Beside a finite score they have no weight, in whichever tile they are; alone they are NaN, as in one tile."""
    q, v = np.ones((1, 3, 1)), np.arange(6.0).reshape(1, 6, 1)
    for finite in (0, 5):
        k = np.full((1, 6, 1), -np.inf)
        k[0, finite] = 1.0
        out = pa.attention(make(q), make(k), make(v), kernel="tiled")
        assert_close(to_np(out), np.full((1, 3, 1), float(finite)))
    out = pa.attention(make(q), make(np.full((1, 6, 1), -np.inf)), make(v), kernel="tiled")
    assert np.isnan(to_np(out)).all()


@pytest.mark.parametrize(
    ("arguments", "visited"),
    [
        ({}, 16),
        ({"causal": True}, 10),
        ({"causal": True, "window": (3, None)}, 7),
        ({"window": (0, 0)}, 4),
        ({"key_lengths": 5}, 8),
        ({"causal": True, "q_offset": -16}, 0),
    ],
    ids=str,
)
def test_tiles_that_are_excluded_are_not_visited(monkeypatch, tiles, make, arguments, visited):
    tiles(4, 4)
    seen = []
    inner = _tiled.sums

    def count(q, k, v, problem, units):
        seen.append((problem.sizes.n_q, problem.sizes.n_k))
        return inner(q, k, v, problem, units)

    monkeypatch.setattr(_tiled, "sums", count)
    host = np.ones((1, 16, 4))
    x = make(host)
    pa.attention(x, x, x, kernel="tiled", **arguments)
    expected = list(loops(tiled_problem(host, host, tile=(4, 4), **arguments)))
    every = [tile for loop in expected for tile in loop.tiles]
    assert len(every) == len(set(every)) == visited
    # A library that loops over compiled code traces each loop once.
    assert len(seen) in (visited, len(expected))
    assert set(seen) <= {(4, 4)}


def test_whole_tiles_are_computed_without_a_mask():
    x = np.ones((1, 12, 4))
    by_kind = {loop.whole: set(loop.tiles) for loop in loops(tiled_problem(x, x, tile=(4, 4), causal=True))}
    assert by_kind == {True: {Tile(4, 0), Tile(8, 0), Tile(8, 4)}, False: {Tile(0, 0), Tile(4, 4), Tile(8, 8)}}


def test_every_score_is_in_one_tile():
    for n_q, n_k in ((1, 1), (5, 7), (4, 4), (2, 9), (129, 1030)):
        x, y = np.zeros((1, n_q, 1)), np.zeros((1, n_k, 1))
        covered = np.zeros((n_q, n_k), dtype=int)
        problem = tiled_problem(x, y)
        for loop in loops(problem):
            for i, j in loop.tiles:
                covered[i : i + loop.n_q, j : j + loop.n_k] += 1
        assert (covered == 1).all()


@pytest.mark.parametrize("tile", [(0, 4), (4, 0), (3, 5)])
def test_a_tile_that_is_refused(tile):
    """Dropout draws the bits of four keys together, so that a tile begins with the first of four."""
    with pytest.raises(pa.ArgumentError, match="the keys a multiple of 4, got"):
        TiledKernel(tile=tile)


def test_memory_grows_with_the_length_not_its_square():
    """The largest array that a long problem makes is a tile of scores, not all of them."""
    for n in (4096, 65536):
        x = np.zeros((8, n, 1))
        n_q, n_k = _tiled.tile_lengths(tiled_problem(x, x))
        assert 8 * n_q * n_k <= 2 * _tiled.SCORES
    assert _tiled.tile_lengths(tiled_problem(np.zeros((8, 1, 1)), np.zeros((8, 4096, 1)))) == (1, 4096)
