"""Rotary embedding: values and gradients in every layout and scaling, norms, relative and large positions."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.backend import ArrayState
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(47)
X, DY = RNG.standard_normal((2, 3, 5, 8)), RNG.standard_normal((2, 3, 5, 8))
IDS = RNG.integers(0, 50, (2, 5))

# Arguments as NumPy integers, which the check converts to arrays of the library.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "interleaved": {"interleaved": True},
    "partial": {"dim": 4},
    "partial-interleaved": {"dim": 6, "interleaved": True},
    "offset": {"offset": 7},
    "offset-negative": {"offset": -3, "base": 100.0},
    "offset-0d": {"offset": np.array(11)},
    "offset-each": {"offset": np.array([3, 90])},
    "positions": {"positions": IDS},
    "positions-shared": {"positions": IDS[0], "interleaved": True},
    "positions-unsigned": {"positions": IDS[:1].astype(np.uint8)},
}
SCALINGS: dict[str, Any] = {
    "linear": (F.LinearScaling(4.0), {"kind": "linear", "factor": 4.0}),
    "ntk": (F.NTKScaling(8.0), {"kind": "ntk", "factor": 8.0}),
    "yarn": (F.YaRNScaling(16.0, 4096), {"kind": "yarn", "factor": 16.0, "original_length": 4096}),
    "llama3": (
        F.Llama3Scaling(),
        {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192},
    ),
}


def moved(make: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    if isinstance(arguments.get("tables"), tuple):
        arguments = {**arguments, "tables": tuple(moved(make, {"": x})[""] for x in arguments["tables"])}
    return {name: make(x, str(x.dtype)) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}


def agree(make: Any, to_np: Any, hosts: Any, dtype: Any, arguments: Any, reference: Any) -> None:
    """Compare value and gradient with the reference for the rounded inputs."""
    x, dy = (make(host, dtype) for host in hosts)
    y, cache = F.rotary_embedding_forward(x, **moved(make, arguments))
    grads = F.rotary_embedding_backward(dy, cache)
    assert grads.positions is None
    assert grads.offset is None
    held, dy_held = (to_np(a).astype(np.float64) for a in (x, dy))
    for got, want, what in (
        (y, ref.rotary_embedding(held, **reference), "y"),
        (F.rotary_embedding(x, **moved(make, arguments)), ref.rotary_embedding(held, **reference), "the short form"),
        (grads.x, ref.rotary_embedding_gradient(dy_held, **reference), "gradient"),
    ):
        assert type(got) is type(x)
        assert got.dtype == x.dtype
        assert_close(to_np(got), want, dtype, what=what)


@pytest.mark.parametrize("case", ARGUMENTS)
def test_value_and_gradient(make: Any, to_np: Any, dtype: Any, case: Any) -> None:
    agree(make, to_np, (X, DY), dtype, ARGUMENTS[case], ARGUMENTS[case])


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_scaling(make: Any, to_np: Any, kind: Any, interleaved: Any) -> None:
    ours, theirs = SCALINGS[kind]
    hosts = [RNG.standard_normal((2, 6, 64)) for _ in range(2)]
    arguments = {"offset": 900, "base": 5e5, "interleaved": interleaved}
    agree(make, to_np, hosts, "float64", {**arguments, "scaling": ours}, {**arguments, "scaling": theirs})


def tables_of(positions: Any, dim: int) -> tuple[Any, Any]:
    """Return the cosines and sines of positions (…, n), (…, n, dim / 2) each."""
    angles = np.asarray(positions)[..., None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    return np.cos(angles), np.sin(angles)


# Tables and other arguments; then the arguments of the reference.
TABLES: dict[str, Any] = {
    "indexed": (tables_of(np.arange(50), 8), {"positions": IDS}, {"positions": IDS}),
    "indexed-shared": (tables_of(np.arange(50), 8), {"positions": IDS[0].astype(np.uint8)}, {"positions": IDS[0]}),
    "rows": (tables_of(IDS, 8), {"interleaved": True}, {"positions": IDS, "interleaved": True}),
    "rows-shared": (tables_of(IDS[0], 8), {}, {"positions": IDS[0]}),
    "rows-broadcast": (tables_of(IDS[:1], 8), {}, {"positions": IDS[0]}),
    "partial": (tables_of(np.arange(50), 4), {"positions": IDS}, {"positions": IDS, "dim": 4}),
    "partial-told": (tables_of(IDS, 6), {"dim": 6, "interleaved": True}, {"positions": IDS, "dim": 6}),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables(make: Any, to_np: Any, dtype: Any, case: Any) -> None:
    """Given cosines and sines of another dtype, by row or by position."""
    tables, arguments, said = TABLES[case]
    said = {**said, "interleaved": arguments.get("interleaved", False)}
    given = {**arguments, "tables": tuple(make(table, "float32") for table in tables)}
    agree(make, to_np, (X, DY), dtype if dtype != "float64" else "float32", given, said)
    if dtype == "float64":
        agree(make, to_np, (X, DY), dtype, {**arguments, "tables": tuple(make(table) for table in tables)}, said)


def test_tables_are_not_read_past_their_end(make: Any, to_np: Any, contract: Any, monkeypatch: Any) -> None:
    """An error if the positions are readable; else such a position gives zeros."""
    tables = tuple(make(table) for table in tables_of(np.arange(3), 8))
    x, ids = make(X[0]), make([0, 1, 2, 3, -1], "int32")
    if contract.state(ids).readable:
        with pytest.raises(pa.ArgumentError, match=r"positions: expected integers in \[0, 3\), got 3"):
            F.rotary_embedding(x, positions=ids, tables=tables)
    monkeypatch.setattr(
        type(contract), "state", lambda self, x: ArrayState(readable=False)
    )  # as on a device, or in a trace
    y = to_np(F.rotary_embedding(x, positions=ids, tables=tables))
    assert_close(y[:, :3], ref.rotary_embedding(X[0])[:, :3])
    assert not y[:, 3:].any()


def test_central_differences(make: Any, to_np: Any) -> None:
    arguments: dict[str, Any] = {"offset": 5, "dim": 6, "scaling": F.YaRNScaling(4.0, 64)}

    def loss(x: Any) -> float:
        return float(np.sum(to_np(F.rotary_embedding(make(x), **arguments)) * DY))

    _, cache = F.rotary_embedding_forward(make(X), **arguments)
    slopes_agree(loss, [X], [to_np(F.rotary_embedding_backward(make(DY), cache).x)])


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6), (2, 2, 3, 4, 6), (0, 3, 4, 6), (2, 3, 0, 6)])
def test_ranks_and_empty_axes(make: Any, to_np: Any, shape: Any) -> None:
    hosts = [RNG.standard_normal(shape) for _ in range(2)]
    agree(make, to_np, hosts, "float64", {"offset": 2}, {"offset": 2})


def test_norms_are_kept(make: Any, to_np: Any, dtype: Any) -> None:
    x = make(X, dtype)
    y = to_np(F.rotary_embedding(x, offset=1000))
    after, before = (np.linalg.norm(a.astype(np.float64), axis=-1) for a in (y, to_np(x)))
    assert_close(after, before, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_alone(make: Any, to_np: Any, interleaved: Any) -> None:
    q, k = X[0, :, :1], DY[0, :, :1]

    def product(of_query: int, of_key: int) -> Any:
        rotated = (
            to_np(F.rotary_embedding(make(x), offset=p, interleaved=interleaved))
            for x, p in ((q, of_query), (k, of_key))
        )
        return np.sum(np.prod([*rotated], axis=0), axis=-1)

    assert_close(product(12, 5), product(7, 0))
    assert_close(product(4103, 4096), product(7, 0))
    assert np.max(np.abs(product(12, 5) - product(12, 6))) > 1e-3


@pytest.mark.parametrize("position", [4095, 4096, 131_071, 10_000_000, -1_000_003])
def test_far_positions_lose_no_digit(make: Any, to_np: Any, position: Any) -> None:
    """Computed in float32, the angle of position 10⁷ would be wrong by half a radian."""
    for dtype in ("float32", "float64"):
        x = make(X, dtype)
        for offset in (position, make(position, "int32")):
            want = ref.rotary_embedding(to_np(x), offset=position)
            error = np.max(np.abs(to_np(F.rotary_embedding(x, offset=offset)) - want))
            assert error <= (3e-6 if dtype == "float32" else 1e-8)


def test_inputs_are_left_alone(make: Any, to_np: Any) -> None:
    x, dy, ids = make(X), make(DY), make(IDS, "int64")
    _, cache = F.rotary_embedding_forward(x, positions=ids)
    F.rotary_embedding_backward(dy, cache)
    for native, host in ((x, X), (dy, DY), (ids, IDS)):
        np.testing.assert_array_equal(to_np(native), host)


def test_one_row_is_the_row_of_the_whole(make: Any, to_np: Any) -> None:
    """Decoding: the rotation of one row at its offset equals that within the sequence, to the last bit but one."""
    whole = to_np(F.rotary_embedding(make(X, "float32")))
    for i in range(X.shape[2]):
        row = F.rotary_embedding(make(X[:, :, i : i + 1], "float32"), offset=i)
        assert_close(to_np(row), whole[:, :, i : i + 1], "float32")


BAD: dict[str, Any] = {
    "rank": ((8,), {}, pa.ShapeError, "x: "),
    "odd": ((4, 7), {}, pa.ShapeError, "x: .*even"),
    "dim-odd": ((4, 8), {"dim": 3}, pa.ShapeError, "dim: .*even"),
    "dim-large": ((4, 8), {"dim": 10}, pa.ShapeError, "dim: .*8"),
    "dim-zero": ((4, 8), {"dim": 0}, pa.ShapeError, "dim: "),
    "dim-type": ((4, 8), {"dim": 2.0}, pa.DTypeError, "dim: "),
    "base": ((4, 8), {"base": 0.5}, pa.ArgumentError, "base: "),
    "base-type": ((4, 8), {"base": "large"}, pa.ArgumentError, "base: "),
    "interleaved": ((4, 8), {"interleaved": "yes"}, pa.ArgumentError, "interleaved: "),
    "scaling": ((4, 8), {"scaling": {"factor": 2.0}}, pa.ArgumentError, "scaling: .*YaRNScaling"),
    "offset-none": ((4, 8), {"offset": None}, pa.DTypeError, "offset: "),
    "offset-float": ((4, 8), {"offset": 1.5}, pa.DTypeError, "offset: "),
    "offset-dtype": ((2, 3, 4, 8), {"offset": np.ones(2)}, pa.DTypeError, "offset: "),
    "offset-shape": ((2, 3, 4, 8), {"offset": np.ones(3, np.int32)}, pa.ShapeError, "offset: "),
    "positions-dtype": ((4, 8), {"positions": np.ones(4)}, pa.DTypeError, "positions: "),
    "positions-type": ((4, 8), {"positions": [0, 1, 2, 3]}, pa.DTypeError, "positions: "),
    "positions-length": ((4, 8), {"positions": np.ones(3, np.int32)}, pa.ShapeError, "positions: .*4 rows"),
    "positions-batch": ((2, 3, 4, 8), {"positions": np.ones((3, 4), np.int32)}, pa.ShapeError, "positions: "),
    "tables-one": ((4, 8), {"tables": np.ones((4, 4))}, pa.ArgumentError, "tables: expected a pair"),
    "tables-dtype": ((4, 8), {"tables": (np.ones((4, 4), int),) * 2}, pa.DTypeError, "cos: expected a floating"),
    "tables-differ": ((4, 8), {"tables": (np.ones((4, 4)), np.ones((4, 3)))}, pa.ShapeError, "sin: expected shape"),
    "tables-wide": ((4, 8), {"tables": (np.ones((4, 5)),) * 2}, pa.ShapeError, "dim: .*8 features, got 10"),
    "tables-rows": ((4, 8), {"tables": (np.ones((5, 4)),) * 2}, pa.ShapeError, "tables: .*4 of x"),
    "tables-batch": ((2, 3, 4, 8), {"tables": (np.ones((3, 4, 4)),) * 2}, pa.ShapeError, "tables: .*broadcasts"),
    "tables-rank": (
        (4, 8),
        {"tables": (np.ones((1, 4, 4)),) * 2, "positions": np.ones(4, np.int32)},
        pa.ShapeError,
        "tables: .*m",
    ),
    "tables-dim": ((4, 8), {"tables": (np.ones((4, 4)),) * 2, "dim": 6}, pa.ShapeError, "tables: .*dim=6"),
    "tables-offset": ((4, 8), {"tables": (np.ones((4, 4)),) * 2, "offset": 1}, pa.ArgumentError, "tables: .*offset"),
    "tables-base": ((4, 8), {"tables": (np.ones((4, 4)),) * 2, "base": 9.0}, pa.ArgumentError, "tables: .*base"),
    "both": ((4, 8), {"positions": np.ones(4, np.int32), "offset": 1}, pa.ArgumentError, "offset: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(make: Any, case: Any) -> None:
    shape, arguments, error, words = BAD[case]
    for function in (F.rotary_embedding, F.rotary_embedding_forward):
        with pytest.raises(error, match=words):
            function(make(np.zeros(shape)), **moved(make, arguments))


def test_integers_are_not_turned(make: Any) -> None:
    with pytest.raises(pa.DTypeError, match=r"x: .*int64"):
        F.rotary_embedding(make(np.ones((4, 8)), "int64"))


def test_compiled(contract: Any, make: Any, to_np: Any) -> None:
    """The offset is an operand of the compiled function: one compilation for all positions."""

    def step(x: Any, dy: Any, offset: Any) -> Any:
        y, cache = F.rotary_embedding_forward(x, offset=offset)
        return y, F.rotary_embedding_backward(dy, cache).x

    compiled = contract.jit(step)
    for offset in (0, 5000):
        y, dx = compiled(make(X), make(DY), make(offset, "int32"))
        assert_close(to_np(y), ref.rotary_embedding(X, offset=offset))
        assert_close(to_np(dx), ref.rotary_embedding_gradient(DY, offset=offset))
