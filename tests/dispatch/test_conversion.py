"""Conversion of every kind of array to every library: values unchanged, memory shared as documented, source intact."""

import importlib.util

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry
from polyattn.backend import dtype_name, feature_of

READY = [info.name for info in pa.list_backends() if info.state == "ready"]
BASE = np.arange(24.0).reshape(2, 3, 4) - 7
DTYPES = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
          "float64", "complex64", "complex128")  # fmt: skip
# Between these a plain array is shared, never copied.
SHARING = {name for name in READY if feature_of(registry.load(name), "shared_memory").present}


def test_every_backend_is_ready_or_says_why(info):
    """A broken backend fails the test; one that is not installed is left out of all pairs."""
    assert info.state != "broken", info.reason
    if info.state != "ready":
        pytest.skip(f"{info.name} is {info.state}: {info.reason}")


def misaligned(x):
    buffer = np.zeros(x.nbytes + 1, dtype=np.uint8)
    view = buffer[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def read_only(x):
    x.flags.writeable = False
    return x


def field(x):
    table = np.zeros(x.shape, dtype=[("a", "i1"), ("x", x.dtype), ("b", "i4")])
    table["x"] = x
    return table["x"]


NUMPY = {
    "packed": lambda: BASE.copy(),
    "fortran": lambda: np.asfortranarray(BASE),
    "transposed": lambda: BASE.copy().transpose(2, 0, 1),
    "negative": lambda: BASE.copy()[..., ::-1],
    "negative-rows": lambda: BASE.copy()[::-1, ::-1],
    "strided": lambda: BASE.copy()[..., ::2],
    "offset": lambda: BASE.copy()[1:, 1:, 1:],
    "zero-strides": lambda: np.broadcast_to(np.arange(4.0), (3, 4)),
    "zero-strides-writable": lambda: np.lib.stride_tricks.as_strided(np.arange(4.0), (3, 4), (0, 8), writeable=True),
    "read-only": lambda: read_only(BASE.copy()),
    "misaligned": lambda: misaligned(BASE),
    "big-endian": lambda: BASE.astype(">f8"),
    "big-endian-reversed": lambda: BASE.astype(">f4")[::-1],
    "field": lambda: field(BASE),
    "subclass": lambda: BASE.copy().view(type("Mine", (np.ndarray,), {})),
    "0-d": lambda: np.array(2.5),
    "scalar": lambda: np.float32(2.5),
    "empty": lambda: np.zeros((0, 3)),
    "empty-inside": lambda: np.zeros((2, 0, 3)),
    "empty-reversed": lambda: np.zeros((3, 0))[::-1],
    "one": lambda: np.array([[[3.0]]]),
    "one-reversed": lambda: np.array([[3.0]])[::-1],
    "memmap": None,
    "read-only-memmap": None,
}


# No other library may have this memory: it could write to it, or to many elements at once, or cannot read it.
COPIED = {"zero-strides", "zero-strides-writable", "read-only", "read-only-memmap", "big-endian",
          "big-endian-reversed", "scalar"}  # fmt: skip


def memmap(path, mode):
    BASE.tofile(path)
    return np.memmap(path, BASE.dtype, mode, shape=BASE.shape)


@pytest.mark.parametrize("layout", NUMPY)
def test_from_numpy(layout, target, host, write, tmp_path):
    """The converted array equals the source, which is unchanged; the transfer log is correct about shared memory."""
    if layout.endswith("memmap"):
        x = memmap(tmp_path / "x", "r" if layout.startswith("read") else "r+")
    else:
        x = NUMPY[layout]()
    before = np.array(x)
    with pa.transfers() as account:
        there = pa.to_backend(x, target)
    assert registry.load(target).owns(there)
    assert dtype_name(there.dtype) == x.dtype.name
    np.testing.assert_array_equal(host(there), before)
    np.testing.assert_array_equal(x, before)
    if target == "numpy":
        assert there is x or (layout == "scalar" and type(there) is np.ndarray)
        assert account.count == 0
        return
    (crossing,) = account.crossings
    if x.size and isinstance(x, np.ndarray) and write(x, 9.0):
        assert bool(np.all(host(there) == 9.0)) is not crossing.copied
    if layout in COPIED:
        assert crossing.copied
    assert not crossing.copied or layout != "packed" or target not in SHARING
    back = pa.to_backend(there, "numpy")
    assert type(back) is np.ndarray
    assert back.flags.writeable
    assert back.dtype.isnative


def has(backend, name):
    """Say whether a library has a dtype, by its namespace; NumPy's bfloat16 is from ml_dtypes."""
    if (backend, name) == ("numpy", "bfloat16"):
        return importlib.util.find_spec("ml_dtypes") is not None
    return hasattr(registry.load(backend).namespace(), name)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name, source, target, native, host):
    """The dtype is preserved, or a DTypeError names it."""
    values = np.array([0, 1, 1, 0, 1]).astype(name)
    if not has(source, name):
        with pytest.raises(pa.DTypeError, match=name):
            registry.load(source).dtype(name)
        return
    x = native(source, values)
    if not has(target, name):
        with pytest.raises(pa.DTypeError, match=f"x: {target} .*{name}"):
            pa.to_backend(x, target)
        return
    there = pa.to_backend(x, target)
    assert dtype_name(there.dtype) == name
    np.testing.assert_array_equal(host(there), values)


def test_bfloat16(source, target):
    """It is converted exactly between the libraries that have it, for any order of the axes."""
    bits = np.array([0x0000, 0x8000, 0x3F80, 0xC020, 0x7F80, 0xFF80, 0x0001, 0x7F7F], dtype=np.uint16).reshape(2, 4)
    for name in ("numpy", source, target):
        if not has(name, "bfloat16"):
            with pytest.raises(pa.DTypeError, match="bfloat16"):
                registry.load(name).dtype("bfloat16")
            return
    host_kind, *kinds = (registry.load(name).dtype("bfloat16") for name in ("numpy", source, target))
    x = pa.to_backend(bits.view(host_kind), source)
    assert x.dtype == kinds[0]
    for array, expected in ((x, bits), (x.T, bits.T), (x[1], bits[1])):
        there = pa.to_backend(array, target)
        assert there.dtype == kinds[1]
        np.testing.assert_array_equal(np.ascontiguousarray(pa.to_backend(there, "numpy")).view(np.uint16), expected)


def test_every_pair(source, target, native, host, write):
    """Plain arrays between all pairs: memory is shared as documented, and the transfer log is correct."""
    x = native(source, BASE)
    with pa.transfers() as account:
        there = pa.to_backend(x, target)
    if source == target:
        assert there is x
        assert account.count == 0
        return
    np.testing.assert_array_equal(host(there), BASE)
    (crossing,) = account.crossings
    assert crossing[:3] == ("x", f"{source} on cpu", f"{target} on cpu")
    assert not crossing.copied or not {source, target} <= SHARING
    if write(x, 9.0) or write(there, 9.0):
        assert bool(np.array_equal(host(x), host(there))) is not crossing.copied
    if target == "numpy":
        assert there.flags.writeable


@pytest.mark.parametrize("view", ["transposed", "strided", "empty", "0-d", "expanded"])
def test_views_of_every_library(view, source, target, native, host, write):
    x = native(source, BASE)
    make = {
        "transposed": lambda: x.mT,
        "strided": lambda: x[:, ::2, 1:],
        "empty": lambda: x[:, 3:, :],
        "0-d": lambda: x[1, 2, 3],
        "expanded": lambda: registry.load(source).namespace().broadcast_to(x[:1, :, :], (5, 3, 4)),
    }[view]
    x = make()
    before = host(x)
    with pa.transfers() as account:
        there = pa.to_backend(x, target)
        back = pa.to_backend(there, source)
    assert account.count == (0 if source == target else 2)
    assert tuple(there.shape) == tuple(x.shape) == tuple(back.shape)
    np.testing.assert_array_equal(host(there), before)
    np.testing.assert_array_equal(host(back), before)
    if source != target and view == "expanded" and write(there, 9.0):
        np.testing.assert_array_equal(host(x), before)  # one element for many rows is never written through


def test_copy_true_is_a_copy(source, target, native, host, write):
    x = native(source, BASE)
    there = pa.to_backend(x, target, copy=True)
    if write(x, 9.0):
        np.testing.assert_array_equal(host(there), BASE)
    elif write(there, 9.0):
        np.testing.assert_array_equal(host(x), BASE)
    else:
        assert there.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()


@pytest.mark.parametrize("layout", ["packed", "negative", "read-only", "misaligned", "big-endian", "zero-strides"])
def test_copy_false_shares_or_refuses(layout, target, host, write):
    x = NUMPY[layout]()
    with pa.transfers() as account:
        there = pa.to_backend(x, target)
    if account.count and account.crossings[0].copied:
        assert layout != "packed" or target not in SHARING
        with pytest.raises(pa.BackendMismatchError, match=r"^x: .*copy=None"), pa.transfers() as account:
            pa.to_backend(x, target, copy=False)
        assert account.count == 0
        return
    there = pa.to_backend(x, target, copy=False)
    if write(x, 9.0):
        assert np.all(host(there) == 9.0)


@pytest.mark.parametrize("what", ["text", "object", "dates", "table", "long double"])
def test_what_no_other_library_holds(what, target):
    x = {
        "text": lambda: np.array(["a", "b"]),
        "object": lambda: np.array([1, None], dtype=object),
        "dates": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
        "table": lambda: np.zeros(2, dtype=[("a", "f8"), ("b", "i4")]),
        "long double": lambda: np.zeros(2, dtype=np.longdouble),
    }[what]()
    if target == "numpy" or x.dtype == np.float64:  # some machines' long double is the plain one
        assert pa.to_backend(x, "numpy") is x
        return
    with pytest.raises(pa.DTypeError, match=rf"x: {target} has no dtype"):
        pa.to_backend(x, target)
