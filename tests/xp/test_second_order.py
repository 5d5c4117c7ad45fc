"""Tangents and second derivatives of attention in many tiles, of biases with structure, and beside torch's own."""

import tracemalloc

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES, AttentionCase
from polyattn.testing.conformance.test_second_order import EVERYTHING, Moving, check_jvp, check_vjp


@pytest.fixture
def tiny(tiles):
    """Make tiles of at most 2 queries and 4 keys: 5 × 7 scores are six tiles of four shapes."""
    tiles(2, 4)


# All tiles of one shape, which a library that compiles takes in one loop.
EVEN = AttentionCase(
    "even", lambda rng, shape: {"bias": rng.standard_normal((2, 1, 8)), "sinks": rng.standard_normal(2)},
    q=(2, 4, 3), k=(1, 8, 3), v=(1, 8, 2),
)  # fmt: skip


# Each case is several programs; where they are compiled, the kit and the test of dropout have one of each kind.
@pytest.mark.needs("any_shape")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_every_case_in_tiles(case, tiny, make, to_np):
    moving = Moving(case.problem())
    check_jvp(moving, make, to_np, kernel="tiled")
    check_vjp(moving, make, to_np, kernel="tiled")


@pytest.mark.needs("any_shape")
def test_everything_in_every_dtype(tiny, dtype, make, to_np):
    moving = Moving(EVERYTHING.problem().rounded(to_np, make, dtype))
    moving.directions = {name: to_np(make(u, dtype)).astype(np.float64) for name, u in moving.directions.items()}
    check_jvp(moving, make, to_np, dtype, kernel="tiled")
    check_vjp(moving, make, to_np, dtype, kernel="tiled")


def test_dropout_in_tiles(tiny, make, to_np):
    moving = Moving(EVEN.problem(), keep=ref.keep_mask((2, 4, 8), 0.3, 9), dropout=0.3)
    check_jvp(moving, make, to_np, dropout=0.3, seed=9, kernel="tiled")
    check_vjp(moving, make, to_np, dropout=0.3, seed=9, kernel="tiled")


def test_bias_and_mask_with_structure(make, to_np):
    """They give what the arrays that they stand for give on NumPy; the table's part is the bias's, summed by bucket."""
    rng = np.random.default_rng(6)
    q, k, v, dout = (rng.standard_normal((2, n, 3)) for n in (4, 8, 8, 4))
    table, moved = rng.standard_normal((2, 16, 2))  # 16 buckets: the distances 0 to 7 have one each
    distance = np.arange(8) - (4 + np.arange(4)[:, None])
    bucket = np.maximum(-distance, 0)
    dense, dense_moved = (np.moveaxis(x[bucket], -1, 0) for x in (table, moved))
    results = []
    for bias, u, mask, make_, to_np_ in (
        (pa.relative_position_bias(make(table), bidirectional=False), moved, pa.prefix_mask(2), make, to_np),
        (dense, dense_moved, (distance <= 0) | (np.arange(8) < 2), np.asarray, np.asarray),
    ):
        direction = (make_(q), None, make_(v), make_(u))
        inputs = (make_(q), make_(k), make_(v))
        tangents = pa.attention_jvp(*inputs, direction, bias=bias, mask=mask, return_lse=True)
        _, cache = pa.attention_forward(*inputs, bias=bias, mask=mask)
        second = pa.attention_backward_vjp(direction, make_(dout), cache)
        results.append([to_np_(x) for x in (*tangents, second.dout, second.q, second.k, second.v, second.bias)])
    (*structured, of_table), (*plain, of_bias) = results
    for got, want in zip(structured, plain, strict=True):
        assert_close(got, want)
    summed = np.zeros_like(table)
    np.add.at(summed, bucket, np.moveaxis(of_bias, 0, -1))
    assert_close(of_table, summed)


def test_a_bias_without_an_array_does_not_move(make):
    q = make(np.ones((2, 3, 4)))
    with pytest.raises(pa.ArgumentError, match=r"tangents\.bias: expected None"):
        pa.attention_jvp(q, q, q, (None, None, None, q), bias=pa.alibi_bias(2))


@pytest.mark.needs("any_shape")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's forward mode uses it itself
def test_torch_differentiates_the_formula_to_the_same(make, to_np):
    """Its forward mode, and its backward through its own backward, of the formula as it is written."""
    torch = pytest.importorskip("torch", reason="torch, the peer, is not installed")
    rng = np.random.default_rng(12)
    hosts = [rng.standard_normal(shape) for shape in ((4, 5, 3), (2, 6, 3), (2, 6, 2), (4, 1, 6), (4,))]
    u = [rng.standard_normal(x.shape) for x in hosts]
    dout, dlse = rng.standard_normal((4, 5, 2)), rng.standard_normal((4, 5))
    past = np.triu(np.ones((5, 6), dtype=bool), 2)

    def formula(q, k, v, bias, sinks):
        k, v = (x.repeat_interleave(2, dim=0) for x in (k, v))
        scores = 1.5 * torch.tanh(q @ k.mT * 0.7 / 1.5) + bias
        scores = scores.masked_fill(torch.as_tensor(past), -torch.inf)
        logits = torch.cat([scores, sinks[:, None, None].expand(4, 5, 1)], dim=-1)
        return torch.softmax(logits, dim=-1)[..., :-1] @ v, torch.logsumexp(logits, dim=-1)

    leaves = [torch.tensor(x, requires_grad=True) for x in hosts]
    moved = [torch.tensor(x) for x in u]
    (out, lse), tangents = torch.func.jvp(formula, tuple(torch.tensor(x) for x in hosts), tuple(moved))
    upstream = [torch.tensor(x, requires_grad=True) for x in (dout, dlse)]
    grads = torch.autograd.grad(formula(*leaves), leaves, upstream, create_graph=True)
    want = torch.autograd.grad(grads, [upstream[0], *leaves, upstream[1]], moved)

    arguments = {"bias": make(hosts[3]), "sinks": make(hosts[4]), "causal": True, "scale": 0.7, "softcap": 1.5}
    q, k, v = (make(x) for x in hosts[:3])
    directions = tuple(make(x) for x in u)
    got = pa.attention_jvp(q, k, v, directions, return_lse=True, **arguments)
    for x, y in zip(got, (out, tangents[0], lse, tangents[1]), strict=True):
        assert_close(to_np(x), y.numpy())
    _, cache = pa.attention_forward(q, k, v, **arguments)
    second = pa.attention_backward_vjp(directions, make(dout), cache, make(dlse))
    for name, x, y in zip(second._fields, second, want, strict=True):
        assert_close(to_np(x), y.numpy(), what=name)


def test_memory_does_not_grow_with_the_square():
    """Four times the keys: the tiles are what they were, and only what has a row for each key grows."""
    peaks = []
    for n in (2048, 8192):
        q, k = np.ones((1, 1024, 4), dtype=np.float32), np.ones((1, n, 4), dtype=np.float32)
        out, cache = pa.attention_forward(q, k, k)
        tracemalloc.start()
        pa.attention_jvp(q, k, k, (q, k, k))
        pa.attention_backward_vjp((q, k, k), out, cache)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.3
