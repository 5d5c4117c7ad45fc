"""Row by row work of the NumPy backend: pieces and threads change nothing of the results."""

import threading
from typing import Any

import numpy as np
import pytest

import polyattn as pa
import polyattn_numpy
from polyattn_numpy import _pieces

by_rows = polyattn_numpy.backend.by_rows


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pieces, "PIECE", 64)
    monkeypatch.setattr(_pieces, "WORTHWHILE", 128)


def centred(x: Any) -> tuple[Any, Any]:
    mean = x.mean(axis=-1, keepdims=True)
    return x - mean, mean


def normal(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).normal(size=shape)


def test_a_piece_is_some_rows() -> None:
    seen: list[tuple[int, ...]] = []
    lock = threading.Lock()

    def noted(x: Any, y: Any) -> Any:
        with lock:
            seen.append(x.shape)
        return x + y

    x, y = normal(3, 7, 10), normal(3, 7, 10)
    np.testing.assert_array_equal(by_rows(noted, x, y), x + y)
    assert sorted(seen) == [(3, 10), *[(6, 10)] * 3]


@pytest.mark.parametrize("x", [normal(3, 7, 10), normal(7, 3, 10).swapaxes(0, 1), normal(21, 10)[::-1], normal(4, 400)])
def test_every_layout_and_several_results(x: Any) -> None:
    for found, right in zip(by_rows(centred, x), centred(x), strict=True):
        np.testing.assert_array_equal(found, right)


def test_rows_of_no_axis_and_of_two() -> None:
    x = normal(300)
    np.testing.assert_array_equal(by_rows(np.exp, x, axes=0), np.exp(x))
    x = normal(5, 6, 10)
    np.testing.assert_array_equal(by_rows(lambda x: x.sum(axis=(-2, -1)), x, axes=2), x.sum(axis=(-2, -1)))
    np.testing.assert_array_equal(by_rows(np.exp, x, axes=3), np.exp(x))  # one row


@pytest.mark.parametrize("shape", [(), (0,), (0, 500), (500, 0), (3, 2)])
def test_little_is_not_cut(shape: tuple[int, ...]) -> None:
    calls: list[Any] = []
    x = normal(*shape)
    found = by_rows(lambda x: calls.append(x) or np.negative(x), x, axes=0)
    assert found.shape == shape
    assert len(calls) == 1


def test_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = normal(200, 12).astype("float32"), normal(12, 5).astype("float32")
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(_pieces, "thread_count", lambda threads=threads: threads)
        results.append(by_rows(lambda x: x @ weight, x).tobytes())
    assert len(set(results)) == 1


def test_what_is_raised_in_a_piece_is_raised() -> None:
    def picky(x: Any) -> Any:
        if (x < 0).any():
            raise pa.ArgumentError("x: expected no negative number")
        return x

    with pytest.raises(pa.ArgumentError, match="no negative"):
        by_rows(picky, np.r_[np.ones(500), -1.0], axes=0)


@pytest.mark.parametrize("name", ["gelu", "silu", "layer_norm", "rms_norm", "swiglu", "geglu", "linear"])
def test_operations_in_pieces_are_those_in_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [normal(6, 9, 12) for _ in range(2 if name.endswith("glu") else 1)]
    arrays += [normal(12, 4)] if name == "linear" else []
    forward, backward = (getattr(pa.functional, f"{name}_{way}") for way in ("forward", "backward"))
    y, cache = forward(*arrays)
    found = [y, *backward(y, cache)]
    monkeypatch.setattr(_pieces, "WORTHWHILE", 10**9)
    y, cache = forward(*arrays)
    for piecewise, whole in zip(found, [y, *backward(y, cache)], strict=True):
        if whole is not None:
            np.testing.assert_allclose(piecewise, whole, rtol=1e-13, atol=1e-15)
