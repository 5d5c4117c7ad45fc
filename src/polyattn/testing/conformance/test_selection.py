"""Results are of the inputs' library, the selected backend computes, and there are no other transfers."""

import threading
from typing import Any

import numpy as np
import pytest

import polyattn as pa

X = np.random.default_rng(3).standard_normal((2, 4, 6))


def selected_name() -> str | None:
    selection = pa.get_backend()
    return None if selection is None else selection.backend


def test_nothing_selected_nothing_moves(target: Any, make: Any) -> None:
    x = make(X)
    with pa.transfers("forbid") as record:
        y, cache = pa.functional.softmax_forward(x)
        (dx,) = pa.functional.softmax_backward(y, cache)
        out = pa.attention(x, x, x, causal=True)
    assert record.count == 0
    assert all(target.owns(result) for result in (y, dx, out))


def test_numpy_inputs_come_back_as_numpy(contract: Any, backend: Any) -> None:
    with pa.transfers("allow") as record, pa.use_backend(backend):
        y, cache = pa.functional.softmax_forward(X)
        assert cache.place.backend.name == contract.name
        (dx,) = pa.functional.softmax_backward(y, cache)
    assert type(y) is type(dx) is np.ndarray
    assert y.dtype == dx.dtype == X.dtype
    assert (record.count == 0) == (contract.name == "numpy")


def test_argument_is_stronger_than_the_scope(contract: Any, backend: Any) -> None:
    with pa.use_backend("numpy"):
        out, cache = pa.attention_forward(X, X, X, backend=backend)
    assert cache.place.backend.name == contract.name
    assert type(out) is np.ndarray
    assert type(pa.to_backend(cache.lse, "numpy")) is np.ndarray


def test_default_and_scope(contract: Any, backend: Any) -> None:
    pa.set_backend(backend)
    try:
        assert selected_name() == contract.name
        assert pa.functional.relu_forward(X)[1].place.backend.name == contract.name
        with pa.use_backend("numpy"):
            assert pa.functional.relu_forward(X)[1].place.backend.name == "numpy"
    finally:
        pa.set_backend(None)
    assert pa.get_backend() is None


def test_variable(contract: Any, backend: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("POLYATTN_BACKEND", backend.upper().replace("-", "_"))
    assert selected_name() == contract.name
    assert pa.functional.relu_forward(X)[1].place.backend.name == contract.name
    monkeypatch.setenv("POLYATTN_BACKEND", "")
    assert pa.get_backend() is None


def test_backward_runs_where_the_forward_ran(contract: Any, backend: Any, make: Any) -> None:
    """Another selection between forward and backward has no effect."""
    x = make(X)
    y, cache = pa.functional.softmax_forward(x)
    with pa.use_backend("numpy"), pa.transfers("forbid"):
        (dx,) = pa.functional.softmax_backward(y, cache)
    assert contract.owns(dx)
    with pa.use_backend(backend):
        y, cache = pa.functional.softmax_forward(X)
    assert cache.place.backend.name == contract.name
    (dx,) = pa.functional.softmax_backward(y, cache)
    assert type(dx) is np.ndarray


def test_scope_belongs_to_its_thread(contract: Any, backend: Any) -> None:
    seen = []
    with pa.use_backend(backend):
        thread = threading.Thread(target=lambda: seen.append(pa.get_backend()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_scope_ends_with_an_exception(contract: Any, backend: Any) -> None:
    with pytest.raises(KeyError), pa.use_backend(backend):
        raise KeyError
    assert pa.get_backend() is None


def test_mixed_libraries_are_refused(contract: Any, make: Any) -> None:
    foreign = [info.name for info in pa.list_backends() if info.state == "ready" and info.name != contract.name]
    if not foreign:
        pytest.skip("no other library is installed here, so none can be mixed in")
    other = pa.to_backend(X.astype(np.float32), foreign[0])
    with pytest.raises(pa.BackendMismatchError, match=contract.name):
        pa.attention(make(X, "float32"), other, other)


def test_device_alone_is_refused(contract: Any) -> None:
    with pytest.raises(pa.UnknownBackendError):
        pa.set_backend(None, device=contract.devices()[0])


def test_each_device(contract: Any, backend: Any) -> None:
    for device in contract.devices():
        with pa.use_backend(backend, device=device):
            out, cache = pa.functional.relu_forward(X.astype(np.float32))
        assert cache.place.device == device
        assert type(out) is np.ndarray


def test_layer_is_bound_when_it_is_made(contract: Any, backend: Any) -> None:
    layer = pa.Projection(6, 3, backend=backend, dtype="float64")
    assert layer.backend == contract.name
    assert all(contract.owns(p) for p in layer.parameters().values())
    assert type(layer(X)) is np.ndarray
    with pa.use_backend(backend):
        selected = pa.Projection(6, 3, dtype="float64")
    assert selected.backend == contract.name


def test_layer_bound_by_default_refuses_other_libraries(contract: Any, make: Any) -> None:
    layer = pa.Projection(6, 3, dtype="float64")
    if contract.name == "numpy":
        assert type(layer(make(X))) is np.ndarray
        return
    with pytest.raises(pa.BackendMismatchError, match=r"\.to\("):
        layer(make(X))
    assert contract.owns(layer.to(contract.name)(make(X)))
