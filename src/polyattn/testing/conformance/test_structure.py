"""Structured biases and masks, compared with dense ones that are computed here as in the papers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

import polyattn as pa
from polyattn.backend import TiledKernel, dtype_name
from polyattn.registry import owner
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

BATCH, HEADS, KV_HEADS, N_Q, N_K, D = 2, 6, 2, 6, 12, 4
SCORES = (BATCH, HEADS, N_Q, N_K)
TABLE = np.random.default_rng(1).standard_normal((8, HEADS))
BLOCKS = np.random.default_rng(2).random((HEADS, 3, 3)) < 0.6
Array = NDArray[Any]


def published_slopes(heads: int) -> list[float]:
    """Return the slopes, computed as by the authors of ALiBi."""

    def of_power(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(np.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if np.log2(heads).is_integer():
        return of_power(heads)
    closest = 2 ** int(np.floor(np.log2(heads)))
    return of_power(closest) + published_slopes(2 * closest)[0::2][: heads - closest]


def published_bucket(relative: Array, bidirectional: bool, num_buckets: int, max_distance: int) -> Array:
    """Compute T5's ``_relative_position_bucket``; ``relative`` is a key's position less its query's."""
    ret, n = np.zeros(relative.shape, dtype=int), -relative
    if bidirectional:
        num_buckets //= 2
        ret = ret + (n < 0) * num_buckets
        n = np.abs(n)
    else:
        n = np.maximum(n, 0)
    max_exact = num_buckets // 2
    scaled = np.log(np.maximum(n, 1) / max_exact) / np.log(max_distance / max_exact) * (num_buckets - max_exact)
    large = np.minimum(max_exact + scaled.astype(int), num_buckets - 1)
    return np.asarray(ret + np.where(n < max_exact, n, large))


def relative_positions(q_offset: Any) -> Array:
    """Return the position of each key less that of each query, (…, 1, n_q, n_k)."""
    offset = np.asarray(N_K - N_Q if q_offset is None else q_offset)[..., None, None, None]
    return np.asarray(np.arange(N_K) - (offset + np.arange(N_Q)[:, None]))


class Structure(NamedTuple):
    """A structured bias or mask: its constructor, from a table if it has one, and the same as a dense array."""

    make: Callable[..., Any]
    dense: Callable[[Any], Array]  # of q_offset
    table: Array | None = None
    buckets: Callable[[Any], Array] | None = None


def alibi() -> Structure:
    slopes = np.asarray(published_slopes(HEADS))[:, None, None]
    return Structure(lambda: pa.alibi_bias(HEADS), lambda offset: -slopes * np.abs(relative_positions(offset)))


def relative(bidirectional: bool, max_distance: int, table: Array = TABLE) -> Structure:
    def buckets(offset: Any) -> Array:
        return published_bucket(relative_positions(offset), bidirectional, table.shape[0], max_distance)

    def dense(offset: Any) -> Array:
        return np.concatenate([table[buckets(offset), head] for head in range(HEADS)], axis=-3)

    def make(native: Any) -> Any:
        return pa.relative_position_bias(native, bidirectional=bidirectional, max_distance=max_distance)

    return Structure(make, dense, table, buckets)


def block(size: tuple[int, int], blocks: Array = BLOCKS) -> Structure:
    dense = np.kron(blocks, np.ones((1, *size), dtype=bool))[..., :N_Q, :N_K].astype(bool)
    return Structure(lambda: pa.block_mask(blocks, size), lambda _: dense)


def prefix(length: Any) -> Structure:
    def dense(offset: Any) -> Array:
        in_prefix = np.arange(N_K) < np.asarray(length)[..., None, None, None]
        return np.asarray(in_prefix | (relative_positions(offset) <= 0))

    return Structure(lambda: pa.prefix_mask(length), dense)


def both(a: Structure, b: Structure) -> Structure:
    return Structure(lambda: a.make() & b.make(), lambda offset: a.dense(offset) & b.dense(offset))


NONE_FAR = np.where(np.arange(8)[:, None] == 3, -np.inf, TABLE)
OFFSETS = np.array([0, 7], dtype=np.int32)
IDS = tuple(np.repeat([[0, 1, 2]], n, axis=-1).repeat(2, axis=0).astype(np.int32) for n in (2, 4))
RNG = np.random.default_rng(3)
CASES: dict[str, dict[str, Any]] = {
    "alibi": {"bias": alibi()},
    "alibi-with-all": {
        "bias": alibi(), "causal": True, "q_offset": OFFSETS, "softcap": 3.0, "sinks": RNG.standard_normal(HEADS),
        "mask": RNG.random((N_Q, N_K)) < 0.8, "window": (6, None), "dropout": 0.25,
    },
    "relative": {"bias": relative(True, 5)},
    "relative-with-all": {
        "bias": relative(False, 9), "causal": True, "q_offset": OFFSETS, "segment_ids": IDS, "dropout": 0.25,
        "softcap": 3.0, "scale": 0.8,
    },
    "relative-excluding": {
        "bias": relative(True, 7, NONE_FAR), "q_offset": 3, "key_lengths": np.array([12, 6], dtype=np.int32),
        "mask": block((2, 4)),
    },
    "blocks": {"mask": block((2, 4)), "bias": RNG.standard_normal((HEADS, N_Q, N_K))},
    "prefix": {"mask": prefix(4), "window": (7, None)},
    "prefix-and-blocks": {
        "mask": both(prefix(np.array([3, 8])), block((2, 4))), "bias": alibi(), "q_offset": OFFSETS,
        "sinks": RNG.standard_normal(HEADS),
    },
}  # fmt: skip


class Problem(NamedTuple):
    """A case in NumPy: attention's arguments, and those of the reference."""

    inputs: list[Array]
    dout: Array
    dlse: Array
    given: dict[str, Any]
    dense: dict[str, Any]

    def native(self, make: Any, dtype: str = "float64", table: Any = None) -> dict[str, Any]:
        """Return the arguments as arrays of a library."""

        def convert(x: Any) -> Any:
            if isinstance(x, Structure):
                return x.make() if x.table is None else x.make(make(x.table, dtype) if table is None else table)
            if isinstance(x, tuple) and isinstance(x[0], np.ndarray):
                return tuple(map(convert, x))
            if not isinstance(x, np.ndarray):
                return x
            return make(x, dtype if x.dtype.kind == "f" else x.dtype.name)

        return {name: convert(x) for name, x in self.given.items()}

    def slopes(self) -> list[Array | None]:
        """Return the reference's gradients: that of the table if there is one, and no gradient of a computed bias."""
        q, k, v = self.inputs
        found = ref.attention_gradients(self.dout, q, k, v, self.dlse, **self.dense)
        bias = self.given.get("bias")
        dbias = None if isinstance(bias, Structure) else found.bias
        if isinstance(bias, Structure) and bias.table is not None and bias.buckets is not None:
            dbias = np.zeros(bias.table.shape)
            buckets = np.broadcast_to(bias.buckets(self.given.get("q_offset")), SCORES)
            heads = np.broadcast_to(np.arange(HEADS)[:, None, None], SCORES)
            np.add.at(dbias, (buckets, heads), np.asarray(found.bias))
        return [found.q, found.k, found.v, dbias, found.sinks]


def problem_of(name: str) -> Problem:
    rng, case = np.random.default_rng(0), dict(CASES[name])
    inputs = [
        rng.standard_normal((BATCH, heads, n, D)) for heads, n in ((HEADS, N_Q), (KV_HEADS, N_K), (KV_HEADS, N_K))
    ]
    offset = case.get("q_offset")
    dense = {key: x.dense(offset) if isinstance(x, Structure) else x for key, x in case.items()}
    if isinstance(case.get("bias"), Structure):
        dense["bias"] = np.broadcast_to(dense["bias"], SCORES)
    if "dropout" in case:
        case["seed"] = 5
        dense["keep"] = ref.keep_mask(SCORES, case["dropout"], 5)
    dout, dlse = rng.standard_normal((BATCH, HEADS, N_Q, D)), rng.standard_normal((BATCH, HEADS, N_Q))
    return Problem(inputs, dout, dlse, case, dense)


def compare(problem: Problem, make: Any, to_np: Any, kernel: str | None = None) -> str:
    """Run a problem forward and backward, compare everything, and return the kernel that ran."""
    given = problem.native(make)
    out, cache = pa.attention_forward(*map(make, problem.inputs), **given, kernel=kernel)
    grads = pa.attention_backward(make(problem.dout), cache, make(problem.dlse))
    expected = ref.attention(*problem.inputs, **problem.dense)
    assert_close(to_np(out), expected.out, what=f"out of {cache.kernel}")
    assert_close(to_np(cache.lse), expected.lse, what=f"lse of {cache.kernel}")
    for name, gradient, slope in zip(grads._fields, grads, problem.slopes(), strict=True):
        assert (gradient is None) == (slope is None), name
        if slope is not None:
            assert_close(to_np(gradient), slope, what=f"gradient of {name}, {cache.kernel}")
    return str(cache.kernel)


@pytest.mark.parametrize("name", ["alibi-with-all", "relative-with-all", "prefix-and-blocks"])
def test_as_written_out(make: Any, to_np: Any, name: str) -> None:
    compare(problem_of(name), make, to_np)


def test_in_tiles(monkeypatch: pytest.MonkeyPatch, make: Any, to_np: Any) -> None:
    problem = problem_of("relative-excluding")
    monkeypatch.setattr(type(owner(make(problem.dout))), "kernels", (TiledKernel(tile=(2, 4)),))
    assert compare(problem, make, to_np, "tiled") == "tiled"


def test_weights(make: Any, to_np: Any) -> None:
    problem = problem_of("relative-excluding")
    q, k, _ = map(make, problem.inputs)
    weights = pa.attention_weights(q, k, **problem.native(make))
    assert_close(to_np(weights), ref.attention(*problem.inputs, **problem.dense).weights)


def test_central_differences(make: Any, to_np: Any) -> None:
    problem = problem_of("relative-with-all")

    def loss(q: Any, k: Any, v: Any, table: Any) -> float:
        out, cache = pa.attention_forward(make(q), make(k), make(v), **problem.native(make, table=make(table)))
        lse = to_np(cache.lse)
        some = np.isfinite(lse)
        return float(np.sum(to_np(out) * problem.dout) + np.sum(np.where(some, lse, 0.0) * problem.dlse))

    _, cache = pa.attention_forward(*map(make, problem.inputs), **problem.native(make))
    grads = pa.attention_backward(make(problem.dout), cache, make(problem.dlse))
    slopes_agree(loss, [*problem.inputs, TABLE], [to_np(dx) for dx in grads[:4]])


def test_dtypes(target: Any, make: Any, to_np: Any) -> None:
    """The table may have another dtype than q; its gradient has the dtype of the table."""
    dtype = "float16" if "float16" in target.dtypes else "float32"
    problem, other = problem_of("relative"), "float64" if dtype == "float32" else "float32"
    inputs, dout = [make(x, dtype) for x in problem.inputs], make(problem.dout, dtype)
    out, cache = pa.attention_forward(*inputs, **problem.native(make, other))
    grads = pa.attention_backward(dout, cache)
    held = problem._replace(inputs=[to_np(x) for x in inputs], dout=to_np(dout), dlse=0 * problem.dlse)
    assert_close(to_np(out), ref.attention(*held.inputs, **held.dense).out, dtype)
    assert dtype_name(grads.q.dtype) == dtype
    assert grads.bias is not None
    assert dtype_name(grads.bias.dtype) == other
    assert_close(to_np(grads.bias), held.slopes()[3], dtype)


def test_slopes_of_alibi() -> None:
    """Those of 8 heads are in the paper; those of 12 heads are those of 8, and every other one of 16."""
    assert pa.alibi_bias(8).slopes == (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)
    assert pa.alibi_bias(12).slopes[8:] == (2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5)
    for heads in range(1, 70):
        np.testing.assert_allclose(pa.alibi_bias(heads).slopes, published_slopes(heads), rtol=1e-13)


@pytest.mark.parametrize(("bidirectional", "buckets", "far"), [(True, 32, 128), (False, 32, 128)])
def test_buckets_of_t5(make: Any, to_np: Any, bidirectional: bool, buckets: int, far: int) -> None:
    """One key, and a query at each distance from it: the log-sum-exp is the bias."""
    q, k, table = np.zeros((401, 1)), np.zeros((1, 1)), np.arange(float(buckets))[:, None]
    bias = pa.relative_position_bias(make(table), bidirectional=bidirectional, max_distance=far)
    _, cache = pa.attention_forward(make(q), make(k), make(k), bias=bias, q_offset=-200)
    expected = published_bucket(-(np.arange(401) - 200), bidirectional, buckets, far)
    np.testing.assert_allclose(to_np(cache.lse), expected, rtol=0, atol=1e-12)


def test_without_scores(make: Any, to_np: Any) -> None:
    """Without keys the output is zeros, and the gradient has the table's shape."""
    q, k = make(np.ones((HEADS, 3, D))), make(np.ones((HEADS, 0, D)))
    out, cache = pa.attention_forward(q, k, k, bias=pa.relative_position_bias(make(TABLE)), mask=pa.prefix_mask(0))
    grads = pa.attention_backward(q, cache)
    assert not to_np(out).any()
    np.testing.assert_array_equal(to_np(grads.bias), np.zeros(TABLE.shape))


def test_under_the_compiler(contract: Any, make: Any, to_np: Any) -> None:
    """The table and the offset are traced; static arguments are not."""
    problem = problem_of("relative")
    blocks = block((2, 4))

    def function(q: Any, k: Any, v: Any, table: Any, offset: Any) -> Any:
        bias = pa.relative_position_bias(table, max_distance=5)
        return pa.attention(q, k, v, bias=bias, mask=blocks.make(), q_offset=offset)

    compiled = contract.jit(function)
    for offset in (0, 6):
        out = compiled(*map(make, problem.inputs), make(TABLE), make(offset, "int32"))
        bias = np.broadcast_to(relative(True, 5).dense(offset), SCORES)
        assert_close(to_np(out), ref.attention(*problem.inputs, bias=bias, mask=blocks.dense(None)).out)


def test_layer(contract: Any, make: Any, to_np: Any) -> None:
    """MultiHeadAttention takes them, and returns the table's gradient with those of its inputs."""
    layer = pa.MultiHeadAttention(12, HEADS, dtype="float64", backend=contract.name)
    x, dy = (np.random.default_rng(i).standard_normal((2, N_K, 12)) for i in (7, 8))
    native, mask = make(x), pa.prefix_mask(3)
    distance = np.arange(N_K) - np.arange(N_K)[:, None]
    bias = np.moveaxis(TABLE[published_bucket(distance, True, 8, 5)], -1, 0)
    dense: dict[str, Any] = {"bias": bias, "mask": (np.arange(N_K) < 3) | (distance <= 0)}
    parameters = {name: to_np(w) for name, w in layer.parameters().items()}

    def loss(table: Any) -> float:
        return float(np.sum(to_np(layer(native, bias=of_table(table), mask=mask)) * dy))

    def of_table(table: Any) -> Any:
        return pa.relative_position_bias(make(table), max_distance=5)

    y, cache = layer.forward(native, bias=of_table(TABLE), mask=mask)
    inputs, grads = layer.backward(make(dy), cache)
    want_inputs, want = ref.multi_head_attention_gradients(dy, parameters, x, x, x, HEADS, **dense)
    assert_close(to_np(y), ref.multi_head_attention(parameters, x, x, x, HEADS, **dense))
    assert_close(to_np(inputs.query), sum(want_inputs))
    assert_close(to_np(grads["q_proj.weight"]), want["q_proj.weight"])
    slopes_agree(loss, [TABLE], [to_np(inputs.bias)])


def test_from_another_library(contract: Any, to_np: Any) -> None:
    """The table is transferred like the other arguments, and its gradient is returned; ALiBi has no arrays."""
    problem = problem_of("relative-with-all")
    given = problem.native(lambda x, _: np.asarray(x))
    with pa.transfers() as account:
        out, cache = pa.attention_forward(*problem.inputs, **given, backend=contract.name)
        grads = pa.attention_backward(problem.dout, cache, problem.dlse)
    assert type(out) is type(grads.bias) is np.ndarray
    assert_close(grads.bias, problem.slopes()[3])
    moved = {crossing.what for crossing in account.crossings}
    assert ("bias" in moved) == (contract.name != "numpy")
    x = np.ones((HEADS, 3, D))
    with pa.transfers() as account:
        pa.attention(x, x, x, bias=pa.alibi_bias(HEADS), mask=pa.prefix_mask(1), backend=contract.name)
    assert {crossing.what for crossing in account.crossings} <= {"q", "k", "v", "attention"}


def test_decoding_from_a_cache(contract: Any, make: Any, to_np: Any) -> None:
    """A query at its position in the cache has the bias and the mask of its row in the whole sequence."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, heads, 6, D)) for heads in (HEADS, KV_HEADS, KV_HEADS))
    structures: dict[str, Any] = {"bias": pa.alibi_bias(HEADS), "mask": pa.prefix_mask(2)}
    whole = to_np(pa.attention(make(q), make(k), make(v), **structures))
    cache = pa.KVCache.create(1, KV_HEADS, 6, D, dtype="float64", backend=contract.name)
    cache = cache.append(make(k[:, :, :5]), make(v[:, :, :5])).append(make(k[:, :, 5:]), make(v[:, :, 5:]))
    step = cache.attention(make(q[:, :, 5:]), **structures, causal=False)
    assert_close(to_np(step), whole[:, :, 5:])


def test_explain(make: Any) -> None:
    """``explain`` names the kernel that runs, and the reasons why others do not."""
    problem = problem_of("prefix-and-blocks")
    inputs, given = [make(x) for x in problem.inputs], problem.native(make)
    found = pa.explain(*inputs, **given)
    assert found.kernel == pa.attention_forward(*inputs, **given)[1].kernel
    assert found.kernel not in found.refusals
    assert all(found.refusals.values())


TOO_FEW = np.ones((2, 2), dtype=bool)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda make: {"bias": pa.alibi_bias(4)}, pa.ShapeError, "6 heads of the queries, got 4"),
        (lambda make: {"bias": pa.alibi_bias(0)}, pa.ArgumentError, "num_heads: expected a positive integer, got 0"),
        (lambda make: {"bias": pa.alibi_bias(6, max_bias=0)}, pa.ArgumentError, "max_bias"),
        (lambda make: {"mask": pa.alibi_bias(6)}, pa.DTypeError, "goes into bias="),
        (lambda make: {"bias": pa.prefix_mask(1)}, pa.DTypeError, "goes into mask="),
        (lambda make: {"bias": pa.relative_position_bias(make(TABLE[:, :4]))}, pa.ShapeError, r"got \(8, 4\)"),
        (lambda make: {"bias": pa.relative_position_bias(make(TABLE[:5]))}, pa.ShapeError, "even number of buckets"),
        (lambda make: {"bias": pa.relative_position_bias(make(TABLE[0]))}, pa.ShapeError, r"\(buckets, heads\)"),
        (lambda make: {"bias": pa.relative_position_bias(make(TABLE, "int32"))}, pa.DTypeError, "table"),
        (lambda make: {"bias": pa.relative_position_bias(4)}, pa.BackendMismatchError, "table: expected an array"),
        (lambda make: {"bias": pa.relative_position_bias(make(TABLE), max_distance=2)}, pa.ArgumentError, "above 2"),
        (lambda make: {"mask": pa.block_mask(make(TOO_FEW, "bool"), 4)}, pa.ShapeError, r"\(2, 6, 2, 3\)"),
        (lambda make: {"mask": pa.block_mask(make(TABLE), 4)}, pa.DTypeError, "blocks: expected booleans"),
        (lambda make: {"mask": pa.block_mask([True], 4)}, pa.ShapeError, "blocks: expected"),
        (lambda make: {"mask": pa.block_mask([[True], []], 4)}, pa.ArgumentError, "blocks: expected"),
        (lambda make: {"mask": pa.block_mask(make(TOO_FEW, "bool"), 0)}, pa.ArgumentError, "block_size"),
        (lambda make: {"mask": pa.prefix_mask(-1)}, pa.ArgumentError, "length: expected"),
        (lambda make: {"mask": pa.prefix_mask(1.5)}, pa.DTypeError, "length: expected"),
        (lambda make: {"mask": pa.prefix_mask([1, 2, 3])}, pa.ShapeError, "prefix lengths"),
        (lambda make: {"mask": pa.prefix_mask(1) & make(TOO_FEW, "bool")}, pa.DTypeError, "both sides of &"),
    ],
)  # fmt: skip
def test_bad_input(make: Any, arguments: Any, error: Any, message: str) -> None:
    q, k = make(np.zeros((BATCH, HEADS, N_Q, D))), make(np.zeros((BATCH, HEADS, N_K, D)))
    with pytest.raises(error, match=message):
        pa.attention(q, k, k, **arguments(make))
