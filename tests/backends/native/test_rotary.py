"""The native rotation of pairs against polyattn's formula, bit for bit, and when it is left to the formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn_native import _pointwise, status

pytestmark = pytest.mark.skipif(isinstance(status(), str), reason="there is no native library here")

F = pa.functional
SHAPES = [(5, 2), (3, 4, 6), (2, 3, 7, 16), (2, 1, 9, 34), (1, 2, 300, 66), (3, 2, 1, 258)]


def normal(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def both(x: Any, dy: Any, **options: Any) -> tuple[Any, Any]:
    """Return the result and the gradient of x."""
    y, cache = F.rotary_embedding_forward(x, **options)
    return y, F.rotary_embedding_backward(dy, cache).x


def assert_same(got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_pointwise, "thread_count", lambda backend: request.param)
    return int(request.param)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_the_formula(
    spy: Any, formula: Any, threads: int, shape: tuple[int, ...], dtype: str, interleaved: bool
) -> None:
    x, dy = normal(shape, dtype), normal(shape, dtype, 1)
    for dim in {shape[-1], max(2, shape[-1] // 4 * 2)}:
        options = {"interleaved": interleaved, "dim": dim, "offset": 3}
        got = both(x, dy, **options)
        assert spy.native()
        assert_same(got, formula(lambda options=options: both(x, dy, **options)))


def test_large_problems_use_threads(spy: Any, formula: Any, threads: int) -> None:
    x, dy = normal((2, 8, 1024, 128)), normal((2, 8, 1024, 128), seed=1)
    got = both(x, dy)
    assert spy.native()
    assert_same(got, formula(lambda: both(x, dy)))


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "heads behind the rows": lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    "a part of wider rows": lambda x: np.concatenate([x, x], axis=-1)[..., x.shape[-1] :],
    "rows from the last to the first": lambda x: np.flip(x, (0, 1, 2)).copy()[::-1, ::-1, ::-1],
    "one head for all": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "misaligned": lambda x: np.frombuffer(b" " + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_strides(spy: Any, formula: Any, layout: str, interleaved: bool) -> None:
    x = LAYOUTS[layout](normal((2, 3, 5, 36)))
    got = both(x, x, interleaved=interleaved)
    assert spy.native()
    assert_same(got, formula(lambda: both(x.copy(), x.copy(), interleaved=interleaved)))


ANGLES: dict[str, dict[str, Any]] = {
    "positions of each entry": {"positions": np.arange(10)[::-1].reshape(2, 5)},
    "positions for all": {"positions": np.array([4, 4, 0, 9, 2])},
    "an offset of each entry": {"offset": np.array([3, 50])},
    "scaled": {"scaling": pa.functional.LinearScaling(2.0)},
}


@pytest.mark.parametrize("name", ANGLES)
def test_angles(spy: Any, formula: Any, name: str) -> None:
    x = normal((2, 3, 5, 12))
    got = both(x, x, **ANGLES[name])
    assert spy.native()
    assert_same(got, formula(lambda: both(x, x, **ANGLES[name])))


OTHERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "more axes": (normal((2, 2, 3, 5, 12)), {}),
    "every second feature": (normal((2, 3, 5, 24))[..., ::2], {}),
    "no rows": (normal((2, 3, 0, 12)), {}),
    "the other byte order": (normal((2, 3, 5, 12)).astype(">f4"), {}),
    "tables, whose numbers may be large": (normal((2, 3, 5, 12)), {"tables": (normal((5, 6)), normal((5, 6)))}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_left_to_the_formula(spy: Any, name: str) -> None:
    x, options = OTHERS[name]
    F.rotary_embedding(x, **options)
    assert not any(spy.answers)


def test_numbers_that_are_not_finite_stay_in_their_pairs(spy: Any) -> None:
    x = np.ones((1, 1, 2, 40), np.float32)
    x[..., 0, 3], x[..., 1, 7] = np.nan, np.inf
    y = F.rotary_embedding(x, interleaved=True)
    assert spy.native()
    assert np.argwhere(~np.isfinite(y)).tolist() == [[0, 0, 0, 2], [0, 0, 0, 3], [0, 0, 1, 6], [0, 0, 1, 7]]


@pytest.mark.parametrize("interleaved", [False, True])
def test_bfloat16_of_torch(interleaved: bool) -> None:
    torch = pytest.importorskip("torch")
    x, dy = (torch.from_numpy(normal((2, 3, 5, 36), seed=seed)).bfloat16() for seed in (0, 1))
    for got, want in zip(
        both(x, dy, interleaved=interleaved), both(x.double(), dy.double(), interleaved=interleaved), strict=True
    ):
        assert got.dtype == torch.bfloat16
        np.testing.assert_allclose(got.double(), want, 2**-8, 1e-6)
