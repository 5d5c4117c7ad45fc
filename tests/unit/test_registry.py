"""The owner of an array: NumPy's types, libraries without a plugin, and objects that are not valid arrays."""

import types
from importlib import metadata

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry

X = np.random.default_rng(5).standard_normal((2, 4, 3))
NAMES = {"numpy", "torch", "cupy", "jax", "array-api-strict"}


# ---- names and states -----------------------------------------------------------------------------------------------


def test_every_entry_point_is_listed():
    entries = {entry.name for entry in metadata.entry_points(group="polyattn.backends")}
    assert entries >= NAMES
    assert set(registry.names()) == entries
    assert [info.name for info in pa.list_backends()] == sorted(entries)


def test_each_is_reported_with_what_a_user_needs():
    for info in pa.list_backends():
        assert info.distribution
        assert info.state in ("ready", "not installed", "unavailable", "broken")
        if info.state == "ready":
            assert info.version
            assert info.devices
            assert not info.reason
        else:
            assert info.reason
            assert not info.devices
    numpy = next(info for info in pa.list_backends() if info.name == "numpy")
    assert (numpy.state, numpy.version, numpy.devices) == ("ready", np.__version__, ("cpu",))
    assert numpy.distribution == "polyattn"


def test_what_is_not_installed_is_said_with_its_command():
    for info in pa.list_backends():
        if info.state == "not installed":
            with pytest.raises(pa.BackendUnavailableError) as caught:
                registry.ready(info.name)
            assert info.reason in str(caught.value)
            assert "pip install" in info.install
            assert info.install in str(caught.value)
            assert isinstance(caught.value, ImportError)


def test_names_are_given_back_as_the_plugin_spells_them():
    assert registry.known("ARRAY_API_STRICT") == "array-api-strict"
    assert registry.load("NumPy").name == "numpy"
    assert registry.load("numpy") is registry.ready("numpy")
    with pytest.raises(pa.UnknownBackendError, match=r"'pytorch'.*Did you mean 'torch'\?"):
        registry.known("pytorch")
    with pytest.raises(pa.UnknownBackendError) as caught:
        registry.load("qqqqqq")
    assert "Did you mean" not in str(caught.value)


# ---- NumPy's kinds --------------------------------------------------------------------------------------------------


def test_what_is_numpys(tmp_path):
    class Mine(np.ndarray):
        pass

    memmap = np.memmap(tmp_path / "x", np.float64, "w+", shape=(2, 3))
    for x in (X, X[0, 0, 0], np.array(1.0), memmap, X.view(Mine), np.zeros(2, dtype=[("a", "f8")])["a"]):
        assert registry.owner(x).name == "numpy"


def test_a_read_only_memmap(tmp_path):
    X.tofile(tmp_path / "x")
    x = np.memmap(tmp_path / "x", np.float64, "r", shape=X.shape)
    out, cache = pa.attention_forward(x, x, x, causal=True)
    np.testing.assert_array_equal(out, pa.attention(X, X, X, causal=True))
    grads = pa.attention_backward(np.asarray(out), cache)
    assert grads.q.flags.writeable
    assert (tmp_path / "x").read_bytes() == X.tobytes()


@pytest.mark.parametrize("kind", ["masked", "matrix"])
def test_arrays_whose_arithmetic_means_something_else(kind):
    """A conversion would lose the mask of a masked array, and ``*`` of matrices is a matrix product."""
    x = np.ma.masked_array(X[0], X[0] > 0) if kind == "masked" else X[0].view(np.matrix)
    layer = pa.Projection(3, 3, dtype="float64")
    for attempt in (
        lambda: pa.functional.softmax(x),
        lambda: pa.attention(X[0], X[0], x),
        lambda: pa.attention(X[0], X[0], X[0], mask=x[:, :1] > 0),
        lambda: layer(x),
        lambda: layer.with_parameters({"weight": x[:3], "bias": np.zeros(3)}),
        lambda: pa.to_backend(x, "numpy"),
        lambda: pa.functional.softmax_backward(x, pa.functional.softmax_forward(X[0])[1]),
    ):
        with pytest.raises(pa.BackendMismatchError, match=rf"(x|v|mask|weight|dy): expected an array .* is .*{kind}"):
            attempt()


@pytest.mark.parametrize(
    "x", [[1.0, 2.0], (1.0,), 1.0, 1, None, "text", b"bytes", {}, range(3), object()], ids=lambda x: type(x).__name__
)
def test_what_is_no_array(x):
    for attempt in (
        lambda: pa.functional.softmax(x),
        lambda: pa.attention(x, X, X),
        lambda: pa.Projection(3, 3)(x),
        lambda: pa.MultiHeadAttention(3, 1)(x),
        lambda: pa.to_backend(x, "numpy"),
        lambda: pa.functional.softmax_backward(x, pa.functional.softmax_forward(X)[1]),
    ):
        with pytest.raises(
            pa.BackendMismatchError, match=rf"(x|q|query|dy): expected an array, got {type(x).__name__}"
        ):
            attempt()


# ---- a library without a plugin -------------------------------------------------------------------------------------


class Array:
    """An array of another library: it wraps a NumPy array, and has the operators of the standard."""

    def __init__(self, inner, device="cpu"):
        self._inner, self.device = np.asarray(inner), device

    dtype = property(lambda self: self._inner.dtype)
    shape = property(lambda self: self._inner.shape)
    ndim = property(lambda self: self._inner.ndim)
    size = property(lambda self: self._inner.size)

    def __array_namespace__(self, api_version=None):
        return library

    def __dlpack__(self, **arguments):
        return self._inner.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._inner.__dlpack_device__()

    def to_device(self, device):
        return Array(self._inner, device)

    def __getitem__(self, key):
        return Array(self._inner[key], self.device)

    def __bool__(self):
        return bool(self._inner)

    def __float__(self):
        return float(self._inner)


def _unwrapped(x):
    if isinstance(x, list | tuple):
        return type(x)(map(_unwrapped, x))
    return x._inner if isinstance(x, Array) else x


def _wrapped(function):
    def call(*arguments, device=None, **named):
        found = [x for x in arguments if isinstance(x, Array)]
        result = function(*map(_unwrapped, arguments), **{name: _unwrapped(x) for name, x in named.items()})
        return Array(result, device or (found[0].device if found else "cpu"))

    return call


for _name in ("add", "sub", "mul", "truediv", "pow", "neg", "radd", "rsub", "rmul", "rtruediv", "rpow"):
    setattr(Array, f"__{_name}__", _wrapped(getattr(np.ndarray, f"__{_name}__")))


class Library(types.ModuleType):
    """Its namespace: NumPy's functions on the wrapped arrays; results that are not arrays are unchanged."""

    def __getattr__(self, name):
        import array_api_compat.numpy as xp

        value = getattr(xp, name)  # AttributeError for what NumPy does not have either
        return _wrapped(value) if callable(value) and not isinstance(value, type) else value

    @staticmethod
    def from_dlpack(x, copy=None):
        view = np.from_dlpack(x)  # NumPy 2.0 has no copy=, and its view cannot be exported again
        return Array(view.copy() if copy or not view.flags.writeable else view)

    @staticmethod
    def isdtype(dtype, kind):
        return np.isdtype(dtype, kind)

    @staticmethod
    def __array_namespace_info__():
        return types.SimpleNamespace(devices=lambda: ["cpu", "far"])


library = Library("nowhere_to_be_found")


def test_a_library_without_a_plugin_computes_its_own():
    """Forward and backward by the standard alone: results are its arrays on their device, without transfers."""
    assert registry.owner(Array(X)).name == "nowhere_to_be_found"
    assert registry.owner(Array(X)) is registry.owner(Array(X))
    x = Array(X, "far")
    with pa.transfers("forbid"):
        out, cache = pa.attention_forward(x, x, x, causal=True)
        grads = pa.attention_backward(out, cache)
        y = pa.functional.softmax(x)
    expected, there = pa.attention_forward(X, X, X, causal=True)
    for mine, numpys in zip((out, *grads[:3]), (expected, *pa.attention_backward(expected, there)[:3]), strict=True):
        assert type(mine) is Array
        assert mine.device == "far"
        np.testing.assert_allclose(mine._inner, numpys, rtol=1e-13, atol=1e-15)
    assert type(y) is Array


@pytest.mark.parametrize("device", ["cpu", "far"])
def test_a_library_without_a_plugin_goes_and_returns(device):
    """To another library by selection, and back to its own, on the device that its inputs have."""
    x = Array(X, device)
    with pa.use_backend("numpy"), pa.transfers() as account:
        y, cache = pa.functional.softmax_forward(x)
        (dx,) = pa.functional.softmax_backward(y, cache)
    assert type(y) is type(dx) is Array
    assert y.device == dx.device == device
    np.testing.assert_array_equal(y._inner, pa.functional.softmax(X))
    assert [crossing.target for crossing in account.crossings] == [
        "numpy on cpu", f"nowhere_to_be_found on {device}", "numpy on cpu", f"nowhere_to_be_found on {device}",
    ]  # fmt: skip


def test_mixed_devices_without_a_plugin():
    with pytest.raises(pa.BackendMismatchError, match=r"q is nowhere_to_be_found on cpu, k is nowhere\S+ on far"):
        pa.attention(Array(X), Array(X, "far"), Array(X))
    with pytest.raises(pa.BackendMismatchError, match=r"q is nowhere_to_be_found on cpu, k is numpy on cpu"):
        pa.attention(Array(X), X, X)


def test_caches_outlive_a_refresh():
    """The backend for a library without a plugin is the same after discovery is repeated."""
    y, cache = pa.functional.softmax_forward(Array(X))
    registry.refresh()
    assert type(pa.functional.softmax_backward(y, cache).x) is Array


def test_a_library_that_cannot_export():
    class Closed(Array):
        __dlpack__ = __dlpack_device__ = property()

    with pytest.raises(pa.BackendMismatchError, match=r"x: nowhere_to_be_found has no plugin, and its array .* cannot"):
        pa.to_backend(Closed(X), "numpy")


# ---- what pretends --------------------------------------------------------------------------------------------------


def pretender(namespace):
    return type("Pretender", (), {"dtype": np.dtype("f8"), "shape": (3,), "ndim": 1, "__array_namespace__": namespace})


def _raise(self):
    raise RuntimeError("no namespace today")


@pytest.mark.parametrize(
    "namespace",
    [lambda self: np, lambda self: None, lambda self: types, lambda self: 7, _raise, None],
    ids=["numpys", "none", "another-module", "a-number", "raises", "not-callable"],
)
def test_a_namespace_that_is_none(namespace):
    """The object returns NumPy as its namespace, whose functions convert it; or it returns no namespace."""
    x = pretender(namespace)()
    for attempt in (
        lambda: pa.functional.softmax(x),
        lambda: pa.to_backend(x, "numpy"),
        lambda: registry.owner(x),
    ):
        with pytest.raises(
            pa.BackendMismatchError, match=r"x: expected an array of a known library, .* got .*Pretender"
        ):
            attempt()


def test_attributes_that_raise():
    class Rude:
        dtype = shape = property(lambda self: 1 / 0)

    with pytest.raises(pa.BackendMismatchError, match="x: expected an array, got Rude"):
        pa.functional.softmax(Rude())
