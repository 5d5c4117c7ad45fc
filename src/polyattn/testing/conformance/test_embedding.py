"""Embedding: values, the gradient of the table, every integer type, bad indices, compiled indices."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.backend import ArrayState
from polyattn.testing import assert_close, slopes_agree
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(97)
INDICES = np.array([[2, 0, 2], [4, 2, 1]])  # row 2 three times, row 3 never
WEIGHT, DY = RNG.standard_normal((5, 4)), RNG.standard_normal((2, 3, 4))
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def test_value_and_gradient(make: Any, to_np: Any, dtype: Any) -> None:
    indices, weight, dy = make(INDICES, "int64"), make(WEIGHT, dtype), make(DY, dtype)
    y, cache = F.embedding_forward(indices, weight)
    grads = F.embedding_backward(dy, cache)
    assert type(y) is type(grads.weight) is type(weight)
    assert y.dtype == grads.weight.dtype == weight.dtype
    assert grads.indices is None
    for result in (y, F.embedding(indices, weight)):
        np.testing.assert_array_equal(to_np(result), to_np(weight)[INDICES])
    assert_close(to_np(grads.weight), ref.embedding_gradient(to_np(dy), INDICES, WEIGHT), dtype)
    np.testing.assert_array_equal(to_np(grads.weight)[3], np.zeros(4))
    np.testing.assert_array_equal(to_np(indices), INDICES)
    np.testing.assert_array_equal(to_np(weight), to_np(make(WEIGHT, dtype)))
    np.testing.assert_array_equal(to_np(dy), to_np(make(DY, dtype)))


def test_central_differences(make: Any, to_np: Any) -> None:
    indices = make(INDICES, "int64")
    _, cache = F.embedding_forward(indices, make(WEIGHT))
    slopes_agree(
        lambda weight: float(np.sum(to_np(F.embedding(indices, make(weight))) * DY)),
        [WEIGHT],
        [to_np(F.embedding_backward(make(DY), cache).weight)],
    )


@pytest.mark.parametrize("kind", INTEGERS)
def test_indices_of_every_type(make: Any, to_np: Any, kind: Any) -> None:
    """The table has more rows than the smallest types can represent."""
    weight, indices = RNG.standard_normal((300, 2)), np.array([100, 0, 100])
    y, cache = F.embedding_forward(make(indices, kind), make(weight))
    np.testing.assert_array_equal(to_np(y), weight[indices])
    dy = RNG.standard_normal((3, 2))
    dweight = to_np(F.embedding_backward(make(dy), cache).weight)
    assert_close(dweight, ref.embedding_gradient(dy, indices, weight))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0), (2, 1, 3)])
def test_shapes_of_indices(make: Any, to_np: Any, shape: Any) -> None:
    indices, dy = RNG.integers(0, 5, shape), RNG.standard_normal((*shape, 4))
    y, cache = F.embedding_forward(make(indices, "int64"), make(WEIGHT))
    np.testing.assert_array_equal(to_np(y), WEIGHT[indices])
    assert_close(to_np(F.embedding_backward(make(dy), cache).weight), ref.embedding_gradient(dy, indices, WEIGHT))


def test_long_sums_are_taken_wider(make: Any, to_np: Any, dtype: Any) -> None:
    """The sum of 4096 ones in float16 would stop at 2048, in bfloat16 at 256."""
    _, cache = F.embedding_forward(make(np.ones(4096), "int64"), make(np.zeros((2, 1)), dtype))
    dweight = F.embedding_backward(make(np.ones((4096, 1)), dtype), cache).weight
    np.testing.assert_array_equal(to_np(dweight), [[0.0], [4096.0]])


def test_bad_arguments(make: Any) -> None:
    weight = make(WEIGHT)
    with pytest.raises(pa.DTypeError, match="indices"):
        F.embedding(make(INDICES), weight)
    with pytest.raises(pa.DTypeError, match="weight"):
        F.embedding(make(INDICES, "int64"), make(np.ones((5, 4)), "int64"))
    for shape in ((5,), (0, 4), (5, 4, 1)):
        with pytest.raises(pa.ShapeError, match="weight"):
            F.embedding(make(INDICES, "int64"), make(np.ones(shape)))


@pytest.mark.parametrize("wrong", [-1, 5, 2**31 - 1])
def test_indices_out_of_range(contract: Any, make: Any, to_np: Any, monkeypatch: Any, wrong: Any) -> None:
    """An error if indices are readable; else such an index gives zeros, and its gradient is dropped."""
    indices = make([1, wrong], "int32")
    if contract.state(indices).readable:
        for call in (F.embedding, F.embedding_forward):
            with pytest.raises(pa.ArgumentError, match=rf"indices: .*\[0, 5\), got {wrong}"):
                call(indices, make(WEIGHT))
    monkeypatch.setattr(
        type(contract), "state", lambda self, x: ArrayState(readable=False)
    )  # as on a device, or in a trace
    y, cache = F.embedding_forward(indices, make(WEIGHT))
    np.testing.assert_array_equal(to_np(y), [WEIGHT[1], np.zeros(4)])
    dweight = to_np(F.embedding_backward(make([[1.0] * 4, [np.nan] * 4]), cache).weight)
    np.testing.assert_array_equal(dweight, ref.embedding_gradient(np.ones((1, 4)), [1], WEIGHT))


def test_compiled(contract: Any, make: Any, to_np: Any) -> None:
    def step(indices: Any, weight: Any, dy: Any) -> Any:
        y, cache = F.embedding_forward(indices, weight)
        return y, F.embedding_backward(dy, cache).weight

    y, dweight = contract.jit(step)(make(INDICES, "int32"), make(WEIGHT), make(DY))
    np.testing.assert_array_equal(to_np(y), WEIGHT[INDICES])
    assert_close(to_np(dweight), ref.embedding_gradient(DY, INDICES, WEIGHT))
