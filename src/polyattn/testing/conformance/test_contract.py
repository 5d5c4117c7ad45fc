"""The Backend object fulfils the contract of ``polyattn.backend``; every hook agrees with its fallback."""

import sys
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry
from polyattn.backend import API_VERSION, Backend
from polyattn.testing import assert_close


def test_identity(contract: Any, backend: Any) -> None:
    assert isinstance(contract, Backend)
    assert registry.same_name(contract.name, backend)
    assert contract.api_version == API_VERSION
    assert contract.array_modules
    assert all(isinstance(module, str) for module in contract.array_modules)


def test_status_is_ready(contract: Any) -> None:
    status = contract.status()
    assert status.state == "ready"
    assert status.version


def test_listed(contract: Any) -> None:
    info = next(info for info in pa.list_backends() if info.name == contract.name)
    assert info.state == "ready"
    assert info.devices == tuple(contract.devices())
    assert info.distribution


def test_notes_are_lines(contract: Any) -> None:
    for device in (None, *contract.devices()):
        assert all(isinstance(note, str) and note and "\n" not in note for note in contract.notes(device))


def test_devices_are_addressable(contract: Any) -> None:
    assert contract.devices()
    for device in contract.devices():
        x = pa.to_backend(np.arange(3.0, dtype=np.float32), contract.name, device=device)
        assert contract.device_of(x) == device


def test_owns_its_arrays_only(contract: Any, make: Any) -> None:
    assert contract.owns(make([1.0, 2.0]))
    assert contract.owns(make(3.0))
    assert not contract.owns([1.0, 2.0])
    assert not contract.owns(3.0)
    assert contract.owns(np.zeros(2)) == (contract.name == "numpy")


def test_registry_finds_the_owner(contract: Any, make: Any) -> None:
    assert registry.owner(make([1.0])) is contract


def test_array_modules_name_the_library(contract: Any, make: Any) -> None:
    assert any(module in sys.modules for module in contract.array_modules)
    # A class of the arrays, or a base of one, is defined in one of the modules (or their implementation, "jaxlib").
    homes = {base.__module__.partition(".")[0] for base in type(make([1.0])).__mro__} - {"builtins"}
    assert any(home.startswith(module) for home in homes for module in contract.array_modules)


@pytest.mark.parametrize("name", ["float32", "float64", "int32", "int64", "bool"])
def test_dtype_by_name(contract: Any, make: Any, name: Any) -> None:
    x = make([0, 1], name)
    assert x.dtype == contract.dtype(name)
    assert pa.backend.dtype_name(x.dtype) == name


def test_unknown_dtype(contract: Any) -> None:
    with pytest.raises(pa.DTypeError, match="float12"):
        contract.dtype("float12")


def test_rows_may_come_in_pieces(contract: Any, xp: Any, make: Any, to_np: Any) -> None:
    x = make(np.linspace(-3, 3, 2**19).reshape(8, 2**7, 2**9), "float32")
    doubled, largest = contract.by_rows(lambda x: (x + x, xp.max(x, axis=-1, keepdims=True)), x)
    assert_close(to_np(doubled), to_np(x + x))
    assert_close(to_np(largest), to_np(xp.max(x, axis=-1, keepdims=True)))


def test_an_unknown_operation_is_left_to_polyattn(contract: Any, make: Any) -> None:
    assert contract.operation("an operation of a later version", make([1.0, 2.0])) is None


def test_has_the_functions_of_the_standard(xp: Any) -> None:
    needed = (
        "abs add all any arange argmax asarray astype bitwise_and bitwise_left_shift bitwise_or "
        "bitwise_right_shift bitwise_xor broadcast_arrays broadcast_to ceil clip concat cos cumulative_sum divide "
        "equal exp expm1 finfo flip floor floor_divide from_dlpack full full_like greater greater_equal isfinite "
        "isnan less less_equal log log2 logical_and logical_not logical_or matmul matrix_transpose max maximum "
        "min minimum multiply negative not_equal ones_like permute_dims prod remainder repeat reshape round sin "
        "sqrt square squeeze stack subtract sum take tanh where zeros zeros_like"
    )
    assert [name for name in needed.split() if not hasattr(xp, name)] == []


def test_asarray_takes_its_own(contract: Any, make: Any, to_np: Any) -> None:
    x = make([[1.0, 2.0], [3.0, 4.0]])
    copied = contract.asarray(x, contract.device_of(x), True)
    assert contract.owns(copied)
    assert copied is not x
    np.testing.assert_array_equal(to_np(copied), to_np(x))


def test_ordinary_arrays_may_be_used_and_moved(contract: Any, make: Any) -> None:
    for x in (make([1.0, 2.0]), make(1.0)):
        state = contract.state(x)
        assert (state.unusable, state.captive) == (None, None)
        assert isinstance(state.readable, bool)


def test_to_numpy_shares_memory_where_it_says_so(contract: Any, make: Any) -> None:
    x = make([1.0, 2.0])
    views = [contract.to_numpy(x), contract.to_numpy(x)]
    assert all(isinstance(view, np.ndarray) for view in views)
    np.testing.assert_array_equal(views[0], [1.0, 2.0])
    assert np.shares_memory(*views) == contract.shares(x)


def test_scope_leaves_nothing_behind(contract: Any, make: Any, xp: Any) -> None:
    x = make([1.0, 2.0])
    with contract.scope():
        inside = xp.multiply(x, x)
    with contract.scope(), contract.scope():
        nested = xp.multiply(x, x)
    assert contract.owns(inside)
    assert contract.owns(nested)


def test_jit(contract: Any, make: Any, to_np: Any, xp: Any) -> None:
    def function(tree: Any, scale: Any) -> Any:
        first, second = tree["pair"]
        return {"sum": xp.add(xp.multiply(first, scale), second), "rest": (first, second)}

    compiled = contract.jit(function)
    for factor in (2.0, 3.0):
        result = compiled({"pair": (make([1.0, 2.0]), make([10.0, 20.0]))}, make(factor))
        np.testing.assert_array_equal(to_np(result["sum"]), np.array([1.0, 2.0]) * factor + [10.0, 20.0])
        np.testing.assert_array_equal(to_np(result["rest"][1]), [10.0, 20.0])


def test_scan(contract: Any, make: Any, to_np: Any, xp: Any) -> None:
    here = contract.native_device(contract.device_of(make(0.0)))

    def body(carry: Any, index: Any) -> Any:
        total, _ = carry
        total = xp.add(total, xp.take(values, xp.asarray([index], device=here), axis=0)[0])
        return (total, xp.square(total)), (total, xp.stack([total, total]))

    values = make([1.0, 2.0, 3.0, 4.0])
    (total, square), (totals, pairs) = contract.scan(body, (make(0.0), make(0.0)), 4)
    np.testing.assert_array_equal(to_np(totals), [1.0, 3.0, 6.0, 10.0])
    np.testing.assert_array_equal(to_np(pairs), [[1.0, 1.0], [3.0, 3.0], [6.0, 6.0], [10.0, 10.0]])
    assert (float(to_np(total)), float(to_np(square))) == (10.0, 100.0)


def test_cond(contract: Any, make: Any, to_np: Any, xp: Any) -> None:
    x, y = make([1.0, 2.0]), make([3.0, 4.0])
    for limit, expected in ((0.0, [4.0, 6.0]), (9.0, [-2.0, -2.0])):
        predicate = xp.greater(xp.sum(x), make(limit))
        result = contract.cond(predicate, lambda: xp.add(x, y), lambda: xp.subtract(x, y))
        np.testing.assert_array_equal(to_np(result), expected)


@pytest.mark.parametrize(("axis", "start"), [(0, 0), (0, 2), (1, 1), (-1, 3)])
def test_update_slice(contract: Any, make: Any, to_np: Any, axis: Any, start: Any) -> None:
    x, value = np.arange(20.0).reshape(4, 5), -np.ones((2, 5) if axis == 0 else (4, 2))
    expected = x.copy()
    expected[(slice(None),) * (axis % 2) + (slice(start, start + 2),)] = value
    np.testing.assert_array_equal(to_np(contract.update_slice(make(x), make(value), start, axis)), expected)


@pytest.mark.parametrize("axis", [1, -1])
def test_update_slice_of_each_entry(contract: Any, make: Any, to_np: Any, axis: Any) -> None:
    x, value, starts = np.arange(60.0).reshape(3, 4, 5), -np.ones((3, 2, 5) if axis == 1 else (3, 4, 2)), [0, 2, 1]
    expected = x.copy()
    for entry, start in enumerate(starts):
        expected[(entry, *(slice(None),) * (axis % 3 - 1), slice(start, start + 2))] = -1
    result = contract.update_slice(make(x), make(value), np.array(starts, np.int32), axis)
    np.testing.assert_array_equal(to_np(result), expected)


@pytest.mark.parametrize("tail", [(), (3,), (2, 2)])
def test_index_add(contract: Any, make: Any, to_np: Any, tail: Any) -> None:
    x, value = np.ones((4, *tail)), np.arange(1.0, 1 + 5 * int(np.prod(tail))).reshape(5, *tail)
    index = np.array([2, 0, 2, 2, 1])
    expected = x.copy()
    np.add.at(expected, index, value)
    got = to_np(contract.index_add(make(x), make(index, "int64"), make(value)))
    assert_close(got, expected)


def test_differentiable_computes_the_forward(contract: Any, make: Any, to_np: Any, xp: Any) -> None:
    def forward(a: Any, b: Any) -> Any:
        return xp.multiply(a, b), (a, b)

    def backward(dy: Any, saved: Any) -> Any:
        return xp.multiply(dy, saved[1]), xp.multiply(dy, saved[0])

    product = contract.differentiable(forward, backward)
    if product is None:  # the library does not differentiate
        return
    np.testing.assert_array_equal(to_np(product(make([1.0, 2.0]), make([3.0, 4.0]))), [3.0, 8.0])


def test_synchronize_waits_for_the_results(contract: Any, make: Any, to_np: Any, xp: Any) -> None:
    """After the call, memory shared with NumPy has the results; a call without arrays is valid too."""
    x = make(np.ones((64, 64)))
    y = xp.matmul(x, x)
    assert contract.synchronize(x, y) is None
    assert contract.synchronize() is None
    np.testing.assert_array_equal(to_np(y), np.full((64, 64), 64.0))


def test_kernels_have_names_of_their_own(contract: Any) -> None:
    names = [kernel.name for kernel in contract.kernels]
    assert len(set(names)) == len(names)
    assert all(callable(k.supports) and callable(k.forward) and callable(k.backward) for k in contract.kernels)
