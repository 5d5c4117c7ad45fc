"""Attention's tangents and the backward of its backward, against finite differences of the references."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import TOLERANCES, assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES, AttentionCase

EVERYTHING = next(case for case in CASES if case.name == "everything")
# Few cases, because a compiling library compiles twice for each.
CHOSEN = (
    AttentionCase("two-axes", lambda rng, shape: {}, q=(5, 8), k=(7, 8), v=(7, 6)),
    AttentionCase("broadcast-axes", lambda rng, shape: {}, q=(2, 4, 5, 8), k=(3, 1, 2, 7, 8), v=(3, 2, 2, 7, 6)),
    EVERYTHING,
)
NAMES = ("q", "k", "v", "bias", "sinks")


def by_name(case: Any) -> Any:
    return case.name


class Moving:
    """A problem in NumPy, directions for all differentiable arguments, and the references' derivatives."""

    def __init__(self, problem: Any, **fixed: Any) -> None:
        """Generate the directions; ``fixed`` are more arguments of the references."""
        named = dict(zip(NAMES, problem.inputs, strict=False))
        self.moving = named | {name: x for name, x in problem.arguments.items() if name in NAMES}
        self.fixed = {name: x for name, x in problem.arguments.items() if name not in NAMES} | fixed
        rng = np.random.default_rng(5)
        self.directions = {name: rng.standard_normal(x.shape) for name, x in self.moving.items()}
        self.problem = problem

    def forward(self, **moved: Any) -> tuple[Any, Any]:
        """Return the references' out and lse, 0 in place of −inf."""
        answer = ref.attention(**moved, **self.fixed)
        return answer.out, np.where(np.isneginf(answer.lse), 0.0, answer.lse)

    def backward(self, **moved: Any) -> tuple[Any, ...]:
        """Return the references' gradients of the differentiable arguments."""
        q, k, v, rest = (moved.pop("q"), moved.pop("k"), moved.pop("v"), moved)
        slopes = ref.attention_gradients(self.problem.dout, q, k, v, dlse=self.problem.dlse, **rest, **self.fixed)
        return tuple(getattr(slopes, name) for name in self.moving)

    def along(self, function: Callable[..., tuple[Any, ...]]) -> list[Any]:
        """Return the derivatives of results along the directions, by central differences of the fourth order."""
        step = 5e-5

        def at(times: int) -> tuple[Any, ...]:
            return function(**{name: x + times * step * self.directions[name] for name, x in self.moving.items()})

        ends = zip(at(-2), at(-1), at(1), at(2), strict=True)
        return [(8 * (after - before) - (far - back)) / (12 * step) for back, before, after, far in ends]


def native(moving: Any, make: Any, dtype: Any = "float64") -> Any:
    """Return the inputs, the arguments, the directions, dout and dlse as arrays of the library."""
    inputs, arguments = moving.problem.native(make, dtype)
    directions = tuple(None if (u := moving.directions.get(name)) is None else make(u, dtype) for name in NAMES)
    dlse = make(moving.problem.dlse, "float64" if dtype == "float64" else "float32")
    return inputs, arguments, directions, make(moving.problem.dout, dtype), dlse


def close(actual: Any, expected: Any, what: str, dtype: str = "float64") -> None:
    """Fail unless equal within the error of the differences, relative to the largest, or the dtype's tolerance."""
    tolerance = max(TOLERANCES[dtype], 1e-8)
    scale = max(float(np.max(np.abs(expected))), 1e-2)
    np.testing.assert_allclose(
        np.asarray(actual, dtype=np.float64), expected, rtol=0, atol=tolerance * scale, err_msg=what
    )


def check_jvp(moving: Any, make: Any, to_np: Any, dtype: str = "float64", **more: Any) -> None:
    """Compare both results and both tangents."""
    (q, k, v), arguments, directions, dout, dlse = native(moving, make, dtype)
    arguments |= more
    out, out_dot, lse, lse_dot = pa.attention_jvp(q, k, v, directions, return_lse=True, **arguments)
    plain, cache = pa.attention_forward(q, k, v, **arguments)
    assert type(out_dot) is type(lse_dot) is type(q)
    assert out_dot.dtype == dout.dtype
    assert lse_dot.dtype == dlse.dtype
    np.testing.assert_array_equal(to_np(out), to_np(plain))
    np.testing.assert_array_equal(to_np(lse), to_np(cache.lse))
    for name, got, want in zip(("out", "lse"), (out_dot, lse_dot), moving.along(moving.forward), strict=True):
        close(to_np(got), want.reshape(got.shape), f"tangent of {name}", dtype)


def check_vjp(moving: Any, make: Any, to_np: Any, dtype: str = "float64", **more: Any) -> None:
    """Compare the gradients of dout, dlse and all differentiable arguments."""
    inputs, arguments, directions, dout, dlse = native(moving, make, dtype)
    out, cache = pa.attention_forward(*inputs, **(arguments | more))
    second = pa.attention_backward_vjp(directions, dout, cache, dlse)
    want = dict(zip(moving.moving, moving.along(moving.backward), strict=True))
    want |= dict(zip(("dout", "dlse"), moving.along(moving.forward), strict=True))
    like = {"dout": out, "dlse": cache.lse} | dict(zip(NAMES, inputs, strict=False)) | arguments
    for name, got in second._asdict().items():
        assert (got is None) == (name not in want), f"gradient of {name}: got {type(got)}"
        if got is not None:
            assert type(got) is type(like[name])
            assert got.dtype == like[name].dtype, f"gradient of {name}: {got.dtype}, not {like[name].dtype}"
            close(to_np(got), want[name].reshape(got.shape), f"gradient of {name}", dtype)


@pytest.mark.parametrize("case", CHOSEN, ids=by_name)
def test_jvp(make: Any, to_np: Any, case: Any) -> None:
    check_jvp(Moving(case.problem()), make, to_np)


@pytest.mark.parametrize("case", CHOSEN, ids=by_name)
def test_vjp(make: Any, to_np: Any, case: Any) -> None:
    check_vjp(Moving(case.problem()), make, to_np)


def test_dtypes(make: Any, to_np: Any, dtype: Any) -> None:
    """Sums are in float32 at least: 16-bit results and tangents are accurate to two units in the last place."""
    if dtype == "float64":
        return  # the other tests use float64
    case = AttentionCase("sinks-narrow", lambda rng, shape: {"sinks": rng.standard_normal(shape[-3])})
    moving = Moving(case.problem().rounded(to_np, make, dtype))
    moving.directions = {name: to_np(make(u, dtype)).astype(np.float64) for name, u in moving.directions.items()}
    check_vjp(moving, make, to_np, dtype)  # the gradient of dout is the tangent of out


def test_dropout(make: Any, to_np: Any) -> None:
    problem = AttentionCase("dropout", lambda rng, shape: {}).problem()
    keep = ref.keep_mask((2, 4, 5, 7), 0.3, 9)
    moving = Moving(problem, keep=keep, dropout=0.3)
    check_jvp(moving, make, to_np, dropout=0.3, seed=9)
    check_vjp(moving, make, to_np, dropout=0.3, seed=9)


def test_tangents_and_gradients_are_transposed(make: Any, to_np: Any) -> None:
    """⟨w, J u⟩ = ⟨Jᵀ w, u⟩, and second derivatives commute: ⟨w, H u⟩ = ⟨u, H w⟩."""
    moving = Moving(EVERYTHING.problem())
    (q, k, v), arguments, u, dout, dlse = native(moving, make)
    _, out_dot, _, lse_dot = pa.attention_jvp(q, k, v, u, return_lse=True, **arguments)
    _, cache = pa.attention_forward(q, k, v, **arguments)
    grads = pa.attention_backward(dout, cache, dlse)
    inner = inner_product(to_np, (out_dot, lse_dot), (dout, dlse))
    assert_close(inner_product(to_np, grads, u), inner)

    rng = np.random.default_rng(47)
    w = tuple(make(rng.standard_normal(x.shape)) for x in u)
    by_u, by_w = (pa.attention_backward_vjp(x, dout, cache, dlse) for x in (u, w))
    assert_close(inner_product(to_np, by_w[1:6], u), inner_product(to_np, by_u[1:6], w))
    assert_close(to_np(by_u.dout), to_np(out_dot))
    assert_close(to_np(by_u.dlse), to_np(lse_dot))


def inner_product(to_np: Any, xs: Any, ys: Any) -> Any:
    return sum(np.sum(to_np(x) * to_np(y)) for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_excluded_keys_reach_nothing(make: Any, to_np: Any, poison: Any) -> None:
    """Key 6 is beyond every length: neither its values nor its tangents affect any result."""
    moving = Moving(EVERYTHING.problem())
    (q, _, _), arguments, (uq, _, _, *others), dout, dlse = native(moving, make)
    hosts = [*moving.problem.inputs[1:], moving.directions["k"], moving.directions["v"]]
    results = []
    for value in (0.0, poison):
        k, v, uk, uv = (make(np.where(np.arange(7)[:, None] == 6, value, x)) for x in hosts)
        u = (uq, uk, uv, *others)
        moved = pa.attention_jvp(q, k, v, u, return_lse=True, **arguments)
        _, cache = pa.attention_forward(q, k, v, **arguments)
        second = pa.attention_backward_vjp(u, dout, cache, dlse)
        results.append([to_np(x) for x in (*moved, *second)])
    for clean, dirty in zip(*results, strict=True):
        assert_close(dirty, clean)
    assert not to_np(second.k)[..., 6, :].any()
    assert not to_np(second.v)[..., 6, :].any()


@pytest.mark.parametrize("place", ["q", "tangent", "dout"])
def test_a_row_reaches_only_the_keys_that_it_sees(make: Any, to_np: Any, place: Any) -> None:
    """NaN in one query row affects exactly the keys to which the row may attend."""
    moving = Moving(EVERYTHING.problem())
    hosts = {"q": moving.problem.inputs[0], "tangent": moving.directions["q"], "dout": moving.problem.dout}
    (_, k, v), arguments, (_, *others), _, dlse = native(moving, make)
    masks = {name: x for name, x in moving.problem.arguments.items() if name not in ("scale", "softcap", "sinks")}
    seen = ref.allowed_pairs((2, 4, 5, 7), **masks)[0, :, 3]  # of the fourth query of the first item
    assert 0 < seen.sum() < seen.size
    results = []
    for value in (0.0, np.nan):
        x = {name: host.copy() for name, host in hosts.items()}
        x[place][0, :, 3] = value
        _, cache = pa.attention_forward(make(x["q"]), k, v, **arguments)
        second = pa.attention_backward_vjp((make(x["tangent"]), *others), make(x["dout"]), cache, dlse)
        results.append({name: to_np(gradient) for name, gradient in second._asdict().items()})
    clean, dirty = results
    for name in ("q", "dout"):
        other_rows = np.ones((2, 4, 5), dtype=bool)
        other_rows[0, :, 3] = False
        assert_close(dirty[name][other_rows], clean[name][other_rows], what=name)
    for name in ("k", "v"):
        assert_close(dirty[name][1], clean[name][1], what=name)
        assert_close(dirty[name][0][~seen], clean[name][0][~seen], what=name)
        assert np.isnan(dirty[name][0][seen]).all()


def test_what_stands_still_moves_nothing(make: Any, to_np: Any) -> None:
    problem = CASES[0].problem()
    (q, k, v), _ = problem.native(make, "float64")
    out_dot = pa.attention_jvp(q, k, v, ())[1]
    np.testing.assert_array_equal(to_np(out_dot), np.zeros(problem.dout.shape))
    _, cache = pa.attention_forward(q, k, v)
    second = pa.attention_backward_vjp((None, None, None), make(problem.dout), cache)
    assert second.bias is second.sinks is second.dlse is None
    for got, like in zip(second[:4], (problem.dout, *problem.inputs), strict=True):
        np.testing.assert_array_equal(to_np(got), np.zeros(like.shape))


@pytest.mark.parametrize("length", [0, 3])
def test_nothing_to_attend_to(make: Any, to_np: Any, length: Any) -> None:
    """Without keys, or with all of them excluded, lse is the sink and has its tangent; other tangents are zero."""
    q, k, v = np.ones((2, 4, 3)), np.ones((2, length, 3)), np.ones((2, length, 2))
    sinks, moved = np.array([0.5, -np.inf]), np.array([2.0, 3.0])
    u = (make(q), make(k), make(v), None, make(moved))
    arguments: Any = {"sinks": make(sinks), "key_lengths": 0}
    out, out_dot, lse, lse_dot = (
        to_np(x) for x in pa.attention_jvp(make(q), make(k), make(v), u, return_lse=True, **arguments)
    )
    np.testing.assert_array_equal(out, np.zeros((2, 4, 2)))
    np.testing.assert_array_equal(out_dot, np.zeros((2, 4, 2)))
    np.testing.assert_array_equal(lse, np.repeat(sinks[:, None], 4, axis=1))
    np.testing.assert_array_equal(lse_dot, [[2.0] * 4, [0.0] * 4])  # a sink of −inf counts as no sink
    _, cache = pa.attention_forward(make(q), make(k), make(v), **arguments)
    second = pa.attention_backward_vjp(u, make(np.ones((2, 4, 2))), cache, make(np.ones((2, 4))))
    np.testing.assert_array_equal(to_np(second.dlse), lse_dot)
    for gradient in (second.dout, second.q, second.k, second.v, second.sinks):
        assert not to_np(gradient).any()


def test_under_the_compiler(contract: Any, make: Any, to_np: Any) -> None:
    moving = Moving(CASES[0].problem())
    (q, k, v), _, (uq, uk, uv, *_), dout, dlse = native(moving, make)

    def both(q: Any, k: Any, v: Any, u: Any, dout: Any, dlse: Any) -> Any:
        _, cache = pa.attention_forward(q, k, v)
        return pa.attention_jvp(q, k, v, u)[1], *pa.attention_backward_vjp(u, dout, cache, dlse)[1:4]

    out_dot, *gradients = contract.jit(both)(q, k, v, (uq, uk, uv), dout, dlse)
    close(to_np(out_dot), moving.along(moving.forward)[0], "tangent of out")
    for name, got, want in zip(NAMES, gradients, moving.along(moving.backward), strict=False):
        close(to_np(got), want, f"gradient of {name}")


def test_elsewhere(contract: Any) -> None:
    """NumPy arrays, computed on the backend, give NumPy arrays."""
    moving = Moving(CHOSEN[0].problem())
    (q, k, v), u = moving.problem.inputs, tuple(moving.directions.values())
    out, out_dot = pa.attention_jvp(q, k, v, u, backend=contract.name)
    _, cache = pa.attention_forward(q, k, v, backend=contract.name)
    second = pa.attention_backward_vjp(u, moving.problem.dout, cache, moving.problem.dlse)
    assert all(isinstance(x, np.ndarray) for x in (out, out_dot, *second[:4], second.dlse))
    assert_close(second.dout, out_dot)


def bad_calls(make: Any) -> Any:
    q = make(np.ones((2, 3, 4)))
    out, cache = pa.attention_forward(q, q, q)
    narrow, short = make(np.ones((2, 3, 4)), "float32"), make(np.ones((2, 2, 4)))
    return {
        "tangents of another shape": (lambda: pa.attention_jvp(q, q, q, (short,)), pa.ShapeError, r"tangents\.q"),
        "tangents of another dtype": (lambda: pa.attention_jvp(q, q, q, (q, narrow)), pa.DTypeError, r"tangents\.k"),
        "a bias that is not there": (
            lambda: pa.attention_jvp(q, q, q, (q, q, q, q)), pa.ArgumentError, r"tangents\.bias: expected None"
        ),
        "one array": (lambda: pa.attention_jvp(q, q, q, q), pa.ArgumentError, "tangents: expected a tuple"),
        "six": (lambda: pa.attention_jvp(q, q, q, (q,) * 6), pa.ArgumentError, "got 6 entries"),
        "a number": (lambda: pa.attention_jvp(q, q, q, (1.0,)), pa.BackendMismatchError, r"tangents\.q"),
        "cotangents of another shape": (
            lambda: pa.attention_backward_vjp((short,), out, cache), pa.ShapeError, r"cotangents\.q"
        ),
        "cotangents of sinks that are not there": (
            lambda: pa.attention_backward_vjp((q, q, q, None, q), out, cache), pa.ArgumentError, r"cotangents\.sinks"
        ),
        "dout of another dtype": (lambda: pa.attention_backward_vjp((q,), narrow, cache), pa.DTypeError, "dout"),
        "no cache": (lambda: pa.attention_backward_vjp((q,), out, out), pa.BackendMismatchError, "cache"),
    }  # fmt: skip


BAD = (
    "tangents of another shape", "tangents of another dtype", "a bias that is not there", "one array", "six",
    "a number", "cotangents of another shape", "cotangents of sinks that are not there", "dout of another dtype",
    "no cache",
)  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(make: Any, name: Any) -> None:
    call, error, message = bad_calls(make)[name]
    with pytest.raises(error, match=message):
        call()
