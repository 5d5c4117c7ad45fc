"""Conversion between NumPy and the backend preserves the values of every layout, and happens only if selected."""

from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing.features import need

DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8", "bool")


def read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


def misaligned(x: Any) -> Any:
    """Return a copy that is misaligned by one byte."""
    buffer = np.zeros(x.nbytes + 1, dtype=np.uint8)
    view = buffer[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


BASE = np.arange(24.0).reshape(2, 3, 4) - 7
LAYOUTS: dict[str, Any] = {
    "packed": lambda: BASE.copy(),
    "fortran": lambda: np.asfortranarray(BASE),
    "transposed": lambda: BASE.copy().transpose(2, 0, 1),
    "reversed": lambda: BASE.copy()[..., ::-1],
    "reversed-rows": lambda: BASE.copy()[::-1],
    "strided": lambda: BASE.copy()[..., ::2],
    "offset": lambda: BASE.copy()[1:, 1:, 1:],
    "broadcast": lambda: np.broadcast_to(np.arange(4.0), (3, 4)),
    "read-only": lambda: read_only(BASE.copy()),
    "misaligned": lambda: misaligned(BASE),
    "0-d": lambda: np.array(2.5),
    "empty": lambda: np.zeros((0, 3)),
    "empty-inside": lambda: np.zeros((2, 0, 3)),
    "one": lambda: np.array([[[3.0]]]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_arrive_and_return(contract: Any, xp: Any, layout: Any) -> None:
    source = LAYOUTS[layout]()
    before = source.copy()
    there = pa.to_backend(source, contract.name)
    assert contract.owns(there)
    assert tuple(there.shape) == source.shape
    # Compared on the backend with an array created there, so that two errors of conversion do not cancel.
    own = xp.reshape(xp.asarray(before.tolist(), dtype=contract.dtype("float64")), source.shape)
    assert bool(xp.all(xp.equal(there, own)))
    back = pa.to_backend(there, "numpy")
    assert type(back) is np.ndarray
    np.testing.assert_array_equal(back, before)
    np.testing.assert_array_equal(source, before)
    assert contract.name == "numpy" or back.flags.writeable


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_arrive_and_return(contract: Any, name: Any) -> None:
    try:
        native = contract.dtype(name)
    except pa.DTypeError:
        with pytest.raises(pa.DTypeError):
            pa.to_backend(np.zeros(2, dtype=name), contract.name)
        return
    source = np.array([0, 1, 1, 0, 1], dtype=name)
    there = pa.to_backend(source, contract.name)
    assert there.dtype == native
    back = pa.to_backend(there, "numpy")
    assert back.dtype == source.dtype
    np.testing.assert_array_equal(back, source)


def test_bfloat16_keeps_its_bits(contract: Any, target: Any, make: Any, xp: Any) -> None:
    need(target, "bfloat16")
    values = make([1.0, -2.5, 3.140625, 65536.0], "bfloat16")
    back = pa.to_backend(pa.to_backend(values, "numpy"), contract.name)
    assert back.dtype == values.dtype
    assert bool(xp.all(xp.equal(back, values)))


def test_foreign_byte_order(contract: Any, to_np: Any) -> None:
    """Either the values are converted, or the dtype is rejected with an error."""
    source = np.array([1.0, 2.5], dtype=np.dtype(np.float64).newbyteorder())
    try:
        there = pa.to_backend(source, contract.name)
    except pa.PolyattnError:
        return
    np.testing.assert_array_equal(to_np(there), [1.0, 2.5])


def test_special_values(contract: Any, to_np: Any) -> None:
    source = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324])
    there = to_np(pa.to_backend(source, contract.name))
    np.testing.assert_array_equal(there, source)
    assert np.signbit(there[3])


def test_copy_is_apart_from_its_source(contract: Any, to_np: Any) -> None:
    source = np.arange(4.0)
    copied = pa.to_backend(source, contract.name, copy=True)
    source[:] = -1.0
    np.testing.assert_array_equal(to_np(copied), np.arange(4.0))


def test_no_copy_is_refused_where_one_is_needed(contract: Any, to_np: Any) -> None:
    source = np.arange(4.0)[::-1]
    try:
        there = pa.to_backend(source, contract.name, copy=False)
    except pa.BackendMismatchError:
        return
    source[:] = 7.0  # the memory is shared if the view was not rejected
    np.testing.assert_array_equal(to_np(there), np.full(4, 7.0))


def test_results_from_the_backend_are_writable(contract: Any, make: Any) -> None:
    for x in (make(np.arange(6.0).reshape(2, 3)), pa.functional.relu(make([-1.0, 2.0]))):
        host = pa.to_backend(x, "numpy")
        host[...] = 0.0
        assert not host.any()


def test_going_nowhere_is_no_crossing(contract: Any, make: Any) -> None:
    x = make([1.0, 2.0])
    with pa.transfers("forbid") as record:
        assert pa.to_backend(x, contract.name) is x
    assert record.count == 0


def test_crossings_are_counted(contract: Any) -> None:
    source = np.arange(4.0)
    with pa.transfers("allow") as record:
        pa.to_backend(pa.to_backend(source, contract.name), "numpy")
    assert record.count == (0 if contract.name == "numpy" else 2)


def test_forbidden_crossing(contract: Any, make: Any) -> None:
    others = [info.name for info in pa.list_backends() if info.state == "ready" and info.name != contract.name]
    if not others:
        pytest.skip("no other library is installed here, so nothing can cross")
    with pa.transfers("forbid"), pytest.raises(pa.BackendMismatchError, match=contract.name):
        pa.to_backend(make([1.0], "float32"), others[0])


def test_every_other_library(contract: Any, make: Any, to_np: Any) -> None:
    """From the backend to each other installed library, and back."""
    x = make(np.arange(6.0).reshape(2, 3), "float32")
    for info in pa.list_backends():
        if info.state == "ready":
            back = pa.to_backend(pa.to_backend(x, info.name), contract.name)
            assert contract.owns(back)
            np.testing.assert_array_equal(to_np(back), np.arange(6.0).reshape(2, 3))
