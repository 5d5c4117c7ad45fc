"""The backend that computes: five levels of selection, by name and device."""

from contextlib import ExitStack

import numpy as np
import pytest

import polyattn as pa
from polyattn import registry
from polyattn.selection import BACKEND_VARIABLE, DEVICE_VARIABLE, selected

pytestmark = pytest.mark.usefixtures("other")
X = np.arange(6.0).reshape(2, 3)


def now():
    """Return the current selection, as (backend, source)."""
    selection = pa.get_backend()
    return selection and (selection.backend, selection.source)


def computed(**arguments):
    return pa.attention_forward(X, X, X, **arguments)[1].place.backend.name


# ---- the five levels ------------------------------------------------------------------------------------------------


def test_the_levels_from_the_strongest_to_nothing(monkeypatch):
    with ExitStack() as stack:
        monkeypatch.setenv(BACKEND_VARIABLE, "other-one")
        pa.set_backend("numpy")
        stack.enter_context(pa.use_backend("other-one"))
        assert selected("numpy") == ("numpy", None, "backend=")
        assert computed(backend="numpy") == "numpy"
        assert now() == ("other-one", "use_backend")
        assert computed() == "other-one"
    assert now() == ("numpy", "set_backend")
    assert computed() == "numpy"
    pa.set_backend(None)
    assert now() == ("other-one", BACKEND_VARIABLE)
    assert computed() == "other-one"
    monkeypatch.delenv(BACKEND_VARIABLE)
    assert now() is None
    assert computed() == "numpy"


def test_selected_and_different_comes_back():
    with pa.use_backend("other-one"), pa.transfers() as account:
        out = pa.attention(X, X, X)
    assert type(out) is np.ndarray
    assert [crossing.what for crossing in account.crossings] == ["q", "k", "v", "attention"]
    np.testing.assert_allclose(out, pa.attention(X, X, X), rtol=1e-14)  # NumPy may use another kernel


def test_nothing_selected_nothing_moves():
    with pa.transfers("forbid") as account:
        pa.attention(X, X, X)
    assert account.count == 0


@pytest.mark.parametrize("stronger", ["scope", "default", "argument"])
def test_backend_and_device_come_from_one_level(monkeypatch, stronger):
    """If the strongest level names no device, there is none: the device of another level belongs to its backend."""
    monkeypatch.setenv(BACKEND_VARIABLE, "other-one")
    monkeypatch.setenv(DEVICE_VARIABLE, "north:1")
    assert pa.get_backend() == ("other-one", "north:1", BACKEND_VARIABLE)
    with ExitStack() as stack:
        if stronger == "scope":
            stack.enter_context(pa.use_backend("other-one"))
        elif stronger == "default":
            pa.set_backend("other-one")
        selection = selected("other-one" if stronger == "argument" else None)
    assert selection.device is None
    assert selection.source != BACKEND_VARIABLE


def test_a_device_without_a_backend(monkeypatch):
    for attempt in (
        lambda: pa.set_backend(None, device="cpu"),
        lambda: pa.Projection(2, 2, device="cpu"),
        lambda: pa.LayerNorm(2, device="cpu"),
        lambda: pa.MultiHeadAttention(4, 2, device="cpu"),
    ):
        with pytest.raises(pa.UnknownBackendError, match="device: 'cpu' was given without a backend"):
            attempt()
    with pa.use_backend("numpy"), pytest.raises(pa.UnknownBackendError):
        pa.Projection(2, 2, device="cpu")  # the scope's backend is of another level
    monkeypatch.setenv(DEVICE_VARIABLE, "cpu")
    with pytest.raises(pa.UnknownBackendError, match=f"{DEVICE_VARIABLE}=cpu is set without {BACKEND_VARIABLE}"):
        pa.get_backend()
    with pytest.raises(pa.UnknownBackendError, match=DEVICE_VARIABLE):
        pa.attention(X, X, X)
    assert computed(backend="numpy") == "numpy"  # a stronger level is not disturbed by it


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("cpu", "cpu"), ("CPU", "cpu"), ("cpu:0", "cpu"), ("north", "north:0"), ("North:1", "north:1")],
)
def test_device_names(wanted, found):
    with pa.use_backend("other-one", device=wanted) as selection:
        assert selection.device == found


@pytest.mark.parametrize("device", ["south", "north:2", "", 0, object()])
def test_unknown_devices(device):
    for attempt in (
        lambda: pa.use_backend("other-one", device=device).__enter__(),
        lambda: pa.set_backend("other-one", device=device),
        lambda: pa.to_backend(X, "other-one", device=device),
        lambda: pa.Projection(2, 2, backend="other-one", device=device),
        lambda: pa.Projection(2, 2).to("other-one", device=device),
    ):
        with pytest.raises(pa.BackendUnavailableError, match=r"'other-one' has no device .*'north:0', 'north:1'"):
            attempt()


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["other-one", "other_one", "OTHER_ONE", "Other-One", " other-one ", "other__one"])
def test_names_compare_without_case_and_with_dash_as_underscore(name, monkeypatch):
    assert computed(backend=name) == "other-one"
    with pa.use_backend(name):
        assert now() == ("other-one", "use_backend")
    monkeypatch.setenv(BACKEND_VARIABLE, name)
    assert now() == ("other-one", BACKEND_VARIABLE)


def attempts(name):
    return {
        "argument": lambda: pa.attention(X, X, X, backend=name),
        "weights": lambda: pa.attention_weights(X, X, backend=name),
        "scope": lambda: pa.use_backend(name).__enter__(),
        "default": lambda: pa.set_backend(name),
        "conversion": lambda: pa.to_backend(X, name),
        "layer": lambda: pa.LayerNorm(3, backend=name),
        "layer.to": lambda: pa.LayerNorm(3).to(name),
    }


@pytest.mark.parametrize("way", attempts(""))
def test_a_misspelt_name(way):
    """The message lists all names and the closest one; nothing is selected."""
    with pytest.raises(pa.UnknownBackendError, match=r"'nunpy'.* numpy.*Did you mean 'numpy'\?") as caught:
        attempts("nunpy")[way]()
    assert all(name in str(caught.value) for name in registry.names())
    assert now() is None


@pytest.mark.parametrize("way", attempts(""))
@pytest.mark.parametrize("name", [7, b"numpy", ["numpy"], np, {"numpy": 1}, ""], ids=repr)
def test_what_is_no_name(way, name):
    with pytest.raises(pa.UnknownBackendError, match=r"backend: "):
        attempts(name)[way]()


def test_a_misspelt_variable(monkeypatch):
    monkeypatch.setenv(BACKEND_VARIABLE, "other-won")
    for attempt in (pa.get_backend, computed, lambda: pa.functional.relu(X), lambda: pa.Projection(2, 2)):
        with pytest.raises(pa.UnknownBackendError, match=rf"{BACKEND_VARIABLE}=other-won: .*'other-one'"):
            attempt()
    assert computed(backend="numpy") == "numpy"
    monkeypatch.setenv(BACKEND_VARIABLE, "other-one")
    monkeypatch.setenv(DEVICE_VARIABLE, "south")
    with pytest.raises(pa.BackendUnavailableError, match=f"{DEVICE_VARIABLE}=south: .*north:0"):
        pa.get_backend()


@pytest.mark.parametrize("device", [None, "", "north:1"])
def test_empty_variables_are_unset_ones(monkeypatch, device):
    monkeypatch.setenv(BACKEND_VARIABLE, "other-one")
    if device is not None:
        monkeypatch.setenv(DEVICE_VARIABLE, device)
    assert pa.get_backend() == ("other-one", device or None, BACKEND_VARIABLE)
    monkeypatch.setenv(BACKEND_VARIABLE, "")
    monkeypatch.setenv(DEVICE_VARIABLE, "")
    assert pa.get_backend() is None


def test_variables_are_read_at_use(program):
    """Not at import, where a wrong value would stop programs that do not use it, and not only once."""
    assert program("variables_at_use", POLYATTN_BACKEND="nunpy").split() == ["refused", BACKEND_VARIABLE, "None"]
