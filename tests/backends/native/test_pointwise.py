"""The native pointwise and row operations against polyattn's formulas, and when they are left to these."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn_native import _arrays, _pointwise, operation, status

pytestmark = pytest.mark.skipif(isinstance(status(), str), reason="there is no native library here")

Results = dict[str, Any]
F = pa.functional
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gelu": (1, 0, {}),
    "gelu-tanh": (1, 0, {"approximate": "tanh"}),
    "silu": (1, 0, {}),
    "geglu": (2, 0, {}),
    "geglu-tanh": (2, 0, {"approximate": "tanh"}),
    "swiglu": (2, 0, {}),
    "softmax": (1, 0, {}),
    "log_softmax": (1, 0, {}),
    "layer_norm": (1, 2, {}),
    "layer_norm-alone": (1, 0, {}),
    "layer_norm-gain": (1, 1, {}),
    "layer_norm-no-eps": (1, 2, {"eps": 0.0}),
    "rms_norm": (1, 1, {}),
    "rms_norm-alone": (1, 0, {}),
}
"""The numbers of arrays and of parameters, and the options."""
SHAPES = [(3, 64), (2, 5, 37), (4, 3), (7, 1), (2, 1030), (1, 40_000), (300, 130)]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The number of threads, however few processors."""
    for module in (_arrays, _pointwise):
        monkeypatch.setattr(module, "thread_count", lambda backend: request.param)
    monkeypatch.setattr(_arrays, "ALONE", 0)
    return int(request.param)


def normal(shape: tuple[int, ...], dtype: str, seed: int = 0, size: float = 1.0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * size).astype(dtype)


def results(
    case: str, shape: tuple[int, ...], dtype: str, size: float = 2.0, move: Callable[..., Any] = np.array
) -> Results:
    """Return the result and the gradients of a case, for arrays that ``move`` lays out in memory."""
    name, (count, parameters, options) = case.partition("-")[0], CASES[case]
    arrays = [move(normal(shape, dtype, seed, size)) for seed in range(count)]
    gains = [normal(shape[-1:], dtype, 10 + seed) for seed in range(parameters)]
    y, cache = getattr(F, f"{name}_forward")(*arrays, *gains, **options)
    grads = getattr(F, f"{name}_backward")(move(normal(shape, dtype, 20)), cache)
    return {"y": y, **{f"d{key}": x for key, x in grads._asdict().items() if x is not None}}


def assert_equal(got: Results, want: Results, dtype: str) -> None:
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype == want[name].dtype == dtype, name
        eps, ulps = np.finfo(dtype).eps, 1 if dtype == "float16" else 60  # of 16 bits, only results are rounded
        rounding = eps * max(np.abs(want[name]).max(), 1e-30)
        np.testing.assert_allclose(x, want[name], ulps * eps, ulps / 2 * rounding, err_msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_formula(spy: Any, formula: Any, threads: int, case: str, dtype: str, shape: tuple[int, ...]) -> None:
    if shape[-1] == 1 and "norm" in case:
        pytest.skip("rows of one element have a gradient of rounding errors")
    got = results(case, shape, dtype)
    assert spy.native()
    assert_equal(got, formula(lambda: results(case, shape, dtype)), dtype)


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(_arrays, "ALONE", 0)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(_arrays, "thread_count", lambda backend, threads=threads: threads)
        found.append({name: x.tobytes() for name, x in results(case, (5, 129, 515), "float32").items()})
    assert found[0] == found[1] == found[2]


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "columns of a wider array": lambda x: np.concatenate([x, x], axis=-1)[..., : x.shape[-1]],
    "every second row": lambda x: np.repeat(x, 2, axis=-2)[..., ::2, :],
    "rows from the last to the first": lambda x: np.flip(x, tuple(range(x.ndim - 1))).copy()[::-1, ::-1],
    "misaligned": lambda x: np.frombuffer(b" " + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "from a pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_at_a_distance(spy: Any, formula: Any, case: str, layout: str) -> None:
    got = results(case, (3, 5, 33), "float32", move=LAYOUTS[layout])
    assert spy.native()
    for name, want in results(case, (3, 5, 33), "float32").items():
        np.testing.assert_array_equal(got[name], want, name)


OTHER_LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "Fortran": np.asfortranarray,
    "every second column": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "the other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
    "a subclass": lambda x: x.view(type("Own", (np.ndarray,), {})),
}


@pytest.mark.parametrize("case", ["gelu", "swiglu", "softmax", "layer_norm", "rms_norm"])
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_other_layouts_are_left_to_the_formula(spy: Any, case: str, layout: str) -> None:
    want = results(case, (3, 5, 32), "float32")
    assert spy.native()
    got = results(case, (3, 5, 32), "float32", move=OTHER_LAYOUTS[layout])
    assert not all(spy.answers)
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], 1e-4, 1e-5, err_msg=name)


def test_empty_arrays_are_left_to_the_formula(spy: Any) -> None:
    F.gelu(np.ones((2, 0)))
    F.softmax(np.ones((0, 2)))
    assert not spy.native()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 37), (4, 3)], ids=str)
def test_bfloat16_of_torch(monkeypatch: pytest.MonkeyPatch, case: str, shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    pointwise: Any = pytest.importorskip("polyattn_torch._pointwise")
    native: list[bool] = []

    def computed(name: str, *arrays: Any, **options: Any) -> Any:
        found = operation_of_torch(name, *arrays, **options)
        native.append(found is not None)
        return found

    operation_of_torch = pointwise.operation
    monkeypatch.setattr(pointwise, "operation", computed)
    name, (count, parameters, options) = case.partition("-")[0], CASES[case]
    arrays = [normal(shape, "float32", seed, 2.0) for seed in range(count)]
    gains = [normal(shape[-1:], "float32", 10 + seed) for seed in range(parameters)]
    dy = normal(shape, "float32", 20)
    found = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [torch.from_numpy(x).bfloat16().to(dtype) for x in (*arrays, *gains)]
        y, cache = getattr(F, f"{name}_forward")(*inputs, **options)
        grads = getattr(F, f"{name}_backward")(torch.from_numpy(dy).bfloat16().to(dtype), cache)
        found.append([y, *(x for x in grads if x is not None)])
    assert all(native)
    for x, want in zip(*found, strict=True):
        assert x.dtype == torch.bfloat16
        np.testing.assert_allclose(x.double(), want, 2**-8, 2**-8 * float(want.abs().max()))


def test_softmax_along_another_axis_is_left_to_the_formula(spy: Any) -> None:
    F.softmax(normal((3, 4), "float32"), axis=0)
    assert not spy.native()


def test_norms_of_several_axes(spy: Any, formula: Any) -> None:
    x, dy = normal((3, 4, 5, 6), "float32"), normal((3, 4, 5, 6), "float32", 1)
    weight, bias = normal((5, 6), "float32", 2), normal((5, 6), "float32", 3)

    def compute() -> Results:
        y, cache = F.layer_norm_forward(x, weight, bias, axes=2)
        assert cache.saved.root.shape == (3, 4, 1, 1)
        return {"y": y, **F.layer_norm_backward(dy, cache)._asdict()}

    got = compute()
    assert spy.native()
    assert_equal(got, formula(compute), "float32")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_finite_is_as_in_the_formula(formula: Any, case: str, bad: float) -> None:
    def place(x: Any) -> Any:
        x[1, 2] = bad
        return x

    for dtype in ("float32", "float64"):
        with np.errstate(all="ignore"):
            got = results(case, (3, 40), dtype, move=place)
            want = formula(lambda dtype=dtype: results(case, (3, 40), dtype, move=place))
        for name, x in got.items():
            np.testing.assert_allclose(x, want[name], 1e-4, 1e-5, err_msg=name)


def test_softmax_of_rows_with_excluded_keys_is_native(spy: Any) -> None:
    x = np.array([[0.0, -np.inf, 0.0], [-np.inf] * 3], np.float32)
    np.testing.assert_array_equal(F.softmax(x), [[0.5, 0, 0.5], [np.nan] * 3])
    np.testing.assert_allclose(F.log_softmax(x)[0], [-np.log(2), -np.inf, -np.log(2)], 1e-6)
    assert spy.native()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-20, 1e20, 1e38])
def test_both_ends_of_the_range(formula: Any, case: str, size: float) -> None:
    with np.errstate(all="ignore"):
        got = results(case, (4, 40), "float32", size)
        want = formula(lambda: results(case, (4, 40), "float32", size))
    for name, x in got.items():
        np.testing.assert_array_equal(np.isfinite(x), np.isfinite(want[name]), name)
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(x, want[name], 1e-4, 1e-5 * np.abs(want[name]).max(), err_msg=name)


def test_gelu_of_far_numbers_is_accurate() -> None:
    """x · Φ(x) = −√(x² / 2π) · exp(−x² / 2) · (1 − 1 / x² …) decays to subnormal numbers without a jump."""
    x = np.linspace(-14.5, -1, 4000)
    want, got = F.gelu(x), F.gelu(x.astype(np.float32))
    np.testing.assert_allclose(got, want, 1e-5, 2e-45)
    np.testing.assert_allclose(
        F.silu(np.float32([-104, -100, -90])), F.silu(np.float64([-104, -100, -90])), 1e-5, 2e-45
    )


def test_rows_far_from_zero() -> None:
    """The mean is subtracted twice, and the variance of equal numbers is 0."""
    x = normal((6, 100), "float64") + 1e4
    x = x.astype(np.float32)
    np.testing.assert_allclose(F.layer_norm(x), F.layer_norm(x.astype(np.float64)), 0, 2e-6)
    np.testing.assert_array_equal(F.layer_norm(np.full((5, 77), 12345.678, np.float32)), np.zeros((5, 77)))


MULTIPLIES = isinstance(status(), str) or status().instruction_set.startswith("x86-64-v4")
SHAPES_OF_MAPS = [(96, 32, 32), (97, 515, 65), (200, 1100, 130), (300, 33, 64), (192, 512, 129)]


@pytest.mark.skipif(not MULTIPLIES, reason="NumPy multiplies matrices")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES_OF_MAPS)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_maps(spy: Any, formula: Any, threads: int, dtype: str, m: int, k: int, n: int, bias: bool) -> None:
    """The sizes are at the edges of blocks and panels; small ones are left to NumPy's product."""
    x, weight, dy = normal((2, m // 2, k), dtype), normal((k, n), dtype, 1), normal((2, m // 2, n), dtype, 2)
    given = normal((n,), dtype, 3) if bias else None

    def compute() -> Results:
        y, cache = F.linear_forward(x, weight, given)
        grads = F.linear_backward(dy, cache)._asdict()
        return {"y": y, **{name: dx for name, dx in grads.items() if dx is not None}}

    got = compute()
    assert spy.answers[0] == (m // 2 * 2 >= 96)
    for name, want in formula(compute).items():
        assert got[name].shape == want.shape
        np.testing.assert_allclose(got[name], want, 0, 60 * np.finfo(dtype).eps * np.abs(want).max(), err_msg=name)


@pytest.mark.skipif(not MULTIPLIES, reason="NumPy multiplies matrices")
def test_products_of_matrices_with_any_strides(spy: Any, formula: Any) -> None:
    x, weight = normal((128, 2 * 80), "float32"), normal((80, 96), "float32", 1)
    layouts = [(x[:, ::2], weight), (x[::-1, :80], np.asfortranarray(weight)), (x[:, :80], weight[::-1, ::-1])]
    for a, b in layouts:
        got = F.linear(a, b)
        assert spy.native()
        np.testing.assert_allclose(got, a.copy() @ b.copy(), 0, 1e-4)


@pytest.mark.skipif(not MULTIPLIES, reason="NumPy multiplies matrices")
@pytest.mark.parametrize("big", [np.inf, np.nan, 1e38])
def test_linear_maps_out_of_range_are_left_to_the_formula(spy: Any, big: float) -> None:
    x, weight = normal((128, 64), "float32"), normal((64, 64), "float32", 1)
    x[3, :2], weight[:2, 5] = [big, -big], 100
    y = F.linear(x, weight)
    assert not spy.native()
    assert np.isfinite(y[4]).all()
    if np.isfinite(big):
        assert np.isfinite(y).all()


@pytest.mark.skipif(not MULTIPLIES, reason="NumPy multiplies matrices")
def test_the_number_of_threads_changes_no_bit_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = normal((300, 700), "float32"), normal((700, 333), "float32", 1), normal((333,), "float32", 2)
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(_pointwise, "thread_count", lambda backend, threads=threads: threads)
        found.append(F.linear(x, weight, bias).tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("eps_root", [0.0, 1e-8])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 37, 70_000])
def test_adamw_has_the_bits_of_the_formula(
    spy: Any, formula: Any, threads: int, size: int, decay: float, eps_root: float
) -> None:
    adamw = pa.optim.AdamW(1e-2, eps_root=eps_root, weight_decay=decay)
    grads = [normal((size,), "float32", seed) for seed in range(3)]

    def train() -> Any:
        params = {"p": normal((size,), "float32", 9)}
        state = adamw.init(params)
        for grad in grads:
            params, state = adamw.update({"p": grad}, state, params)
        return params["p"], state["mean.p"], state["square.p"]

    got = train()
    assert spy.native()
    for x, y in zip(got, formula(train), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.parametrize("grad", [1e-30, 1e25, np.nan, np.inf])
def test_adamw_leaves_squares_out_of_range_to_the_formula(spy: Any, grad: float) -> None:
    adamw, params = pa.optim.AdamW(0.1), {"p": np.ones(40, np.float32)}
    grads = np.ones(40, np.float32)
    grads[39] = grad
    _, state = adamw.update({"p": grads}, adamw.init(params), params)
    assert not spy.native()
    assert not state["square.p"][39] > 0  # −√v, or NaN


def test_adamw_does_not_modify_its_inputs() -> None:
    adamw, params, grads = pa.optim.AdamW(0.1), {"p": np.ones(40)}, {"p": np.ones(40)}
    state = adamw.init(params)
    adamw.update(grads, state, params)
    assert (params["p"] == 1).all()
    assert not state["mean.p"].any()
    assert not state["square.p"].any()


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_pointwise, "library", lambda: "switched off")
    _pointwise.operations.cache_clear()
    yield
    _pointwise.operations.cache_clear()


@pytest.mark.usefixtures("without_library")
def test_without_a_library_the_formula_is_computed() -> None:
    assert operation("gelu", np.ones(3), approximate="none") is None
    np.testing.assert_allclose(F.gelu(np.ones(3)), 0.8413447460685429)
