"""Transfers: caches and layers keep their place, and every transfer is counted, logged or forbidden."""

import logging

import numpy as np
import pytest

import polyattn as pa
from polyattn.selection import BACKEND_VARIABLE

pytestmark = pytest.mark.usefixtures("other")
X = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize("later", [None, "numpy", "other-one"])
@pytest.mark.parametrize("first", ["numpy", "other-one"])
def test_a_backward_runs_where_its_forward_ran(first, later):
    out, cache = pa.attention_forward(X, X, X, backend=first)
    pa.set_backend(later)
    with pa.transfers() as account:
        grads = pa.attention_backward(np.ones_like(out), cache)
    expected = {"numpy": [], "other-one": ["dout", "dq", "dk", "dv"]}[first]
    assert [crossing.what for crossing in account.crossings] == expected
    assert all(type(grad) is np.ndarray for grad in grads[:3])
    assert type(cache.lse) is np.ndarray


def test_dy_of_another_library_is_refused():
    import other_one

    _, cache = pa.functional.softmax_forward(X)
    with pytest.raises(
        pa.BackendMismatchError, match="dy: expected an array like the inputs, on numpy on cpu, got one"
    ):
        pa.functional.softmax_backward(X.view(other_one.Array), cache)
    with pa.use_backend("other-one"):
        _, cache = pa.functional.softmax_forward(X)
    with pytest.raises(pa.BackendMismatchError, match="dy: "):  # it is computed there, but its inputs were NumPy's
        pa.functional.softmax_backward(X.view(other_one.Array), cache)


def test_a_layer_is_bound_when_it_is_made(monkeypatch):
    by_argument = pa.Projection(3, 2, dtype="float64", backend="other_one", device="north")
    assert (by_argument.backend, by_argument.device) == ("other-one", "north:0")
    with pa.use_backend("other-one"):
        by_scope = pa.Projection(3, 2, dtype="float64")
    pa.set_backend("other-one")
    by_default = pa.Projection(3, 2, dtype="float64")
    pa.set_backend(None)
    monkeypatch.setenv(BACKEND_VARIABLE, "other-one")
    by_variable = pa.Projection(3, 2, dtype="float64")
    monkeypatch.delenv(BACKEND_VARIABLE)
    unbound = pa.Projection(3, 2, dtype="float64")
    assert unbound.backend == "numpy"
    for layer in (by_argument, by_scope, by_default, by_variable):
        assert layer.backend == "other-one"
        with pa.use_backend("numpy"):  # selecting later changes nothing
            y, cache = layer.forward(X)
        assert cache.place.backend.name == "other-one"
        assert type(y) is np.ndarray
        np.testing.assert_array_equal(y, unbound(X))
        dx, grads = layer.backward(np.ones_like(y), cache)
        assert type(dx[0]) is np.ndarray
        assert type(grads["weight"]).__name__ == "Array"  # where the parameters are


def test_a_layer_bound_by_default_takes_only_numpys():
    import other_one

    x = X.view(other_one.Array)
    layer = pa.Projection(3, 2, dtype="float64")
    with pytest.raises(pa.BackendMismatchError, match=r"layer\.to\('other-one', device=None\)"):
        layer(x)
    with pa.use_backend("other-one"), pytest.raises(pa.BackendMismatchError, match=r"layer\.to"):
        layer(x)
    with pa.transfers("forbid"):
        layer(X)
    moved = layer.to("other-one", device=None)
    assert type(moved(X)) is np.ndarray
    with pa.transfers("forbid"):
        moved(x)
    assert layer.backend == "numpy"


def test_foreign_parameters_are_refused():
    import other_one

    layer = pa.Projection(3, 2, bias=False, dtype="float64")
    weight = layer.parameters()["weight"]
    with pytest.raises(pa.BackendMismatchError, match="weight: expected an array of numpy on cpu"):
        layer.with_parameters({"weight": weight.view(other_one.Array)})
    with pytest.raises(pa.CheckpointError, match=r"weight: expected \(3, 2\) float64, got list"):
        layer.load_parameters({"weight": weight.tolist()})
    layer.load_parameters({"weight": weight.view(other_one.Array)})
    assert type(layer.parameters()["weight"]) is np.ndarray
    assert not np.shares_memory(layer.parameters()["weight"], weight)


# ---- transfers ------------------------------------------------------------------------------------------------------


def test_accounts_nest():
    with pa.transfers() as outer:
        pa.to_backend(X, "other-one")
        with pa.transfers() as inner:
            pa.to_backend(X, "other-one")
        pa.to_backend(X, "other-one")
    pa.to_backend(X, "other-one")
    assert (outer.count, inner.count) == (3, 1)


def test_forbidden_within_allowed_and_the_reverse():
    for outer, inner in (("forbid", "allow"), ("allow", "forbid"), ("log", "forbid")):
        with pa.transfers(outer) as a, pa.transfers(inner) as b:
            with pytest.raises(pa.BackendMismatchError, match="x: would go from numpy on cpu to other-one on cpu"):
                pa.to_backend(X, "other-one")
            assert a.count == b.count == 0
    with pytest.raises(KeyError), pa.transfers("forbid"):
        raise KeyError
    pa.to_backend(X, "other-one")


def test_forbid_stops_before_anything_is_computed(monkeypatch):
    layer = pa.Projection(3, 2, dtype="float64", backend="other-one")
    before = layer.parameters()
    out, cache = pa.attention_forward(X, X, X, backend="other-one")
    with pa.transfers("forbid") as account:
        for attempt, what in (
            (lambda: pa.attention(X, X, X, backend="other-one"), "q"),
            (lambda: pa.attention_backward(out, cache), "dout"),
            (lambda: layer(X), "x"),
            (lambda: layer.to("numpy"), "weight"),
            (lambda: layer.load_parameters({"weight": np.ones((3, 2)), "bias": np.ones(2)}), "weight"),
        ):
            with pytest.raises(pa.BackendMismatchError, match=f"{what}: would go .* forbidden here"):
                attempt()
    assert account.count == 0
    assert all(layer.parameters()[name] is before[name] for name in before)


def test_a_refused_crossing_is_not_counted():
    with pa.transfers() as account, pytest.raises(pa.DTypeError):
        pa.to_backend(np.array(["text"]), "other-one")
    assert account.count == 0


def test_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="polyattn"):
        with pa.transfers("allow"):
            pa.to_backend(X, "other-one")
        assert caplog.messages == []
        with pa.transfers("log"), pa.transfers("log"):
            pa.to_backend(X, "other-one")
            pa.to_backend(X, "other-one", copy=True)
    assert caplog.messages == [
        "transfer x: numpy on cpu -> other-one on cpu (shared)",
        "transfer x: numpy on cpu -> other-one on cpu (copied)",
    ]
    assert {record.name for record in caplog.records} == {"polyattn"}


@pytest.mark.parametrize("mode", ["deny", None, "", "FORBID"])
def test_an_unknown_mode(mode):
    with pytest.raises(pa.ArgumentError, match="mode: expected 'allow', 'log' or 'forbid'"), pa.transfers(mode):
        raise AssertionError("entered")
