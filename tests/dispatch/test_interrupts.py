"""An interrupt between any two steps: what is shared or replaced is as before, or as after the call."""

import contextlib
import sys

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import polyattn as pa
from polyattn import _scopes, account, registry, selection
from polyattn_native import _threads


def once(function, at):
    """Return a function that calls another, and is interrupted when it has ended so often."""
    calls = []

    def interrupted(*arguments):
        result = function(*arguments)
        calls.append(arguments)
        if len(calls) == at:
            raise KeyboardInterrupt
        return result

    return interrupted


@pytest.mark.parametrize("scope", [lambda place: pa.use_backend(place), lambda place: pa.transfers()])
def test_the_end_of_a_scope(scope, place, monkeypatch):
    def early(variable, entry):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(_scopes, "_remove", early)
    with pytest.raises(KeyboardInterrupt), scope(place):
        pass
    assert (selection._scopes.get(), account._accounts.get()) == ((), ())


@pytest.mark.parametrize("name", ["numpy", "torch", "array-api-strict"])
def test_native_code_that_never_ends(name):
    """The context of native code is entered, and interrupted before ``with`` could end it."""
    pytest.importorskip(name.replace("-", "_"), reason="its library is not installed")

    def settings():
        torch = sys.modules.get("torch")
        return np.geterr(), torch is None or torch.is_grad_enabled()

    before = settings()
    context = registry.ready(name).scope()
    context.__enter__()
    assert settings() != before
    del context
    assert settings() == before
    with contextlib.suppress(ZeroDivisionError), registry.ready(name).scope():
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.parametrize("at", [1, 2])
def test_the_limit_of_the_blas(at, monkeypatch):
    """Interrupted when it begins, or when it ends."""
    with threadpool_limits(2, user_api="blas"):
        before = _threads._blas_threads()
        monkeypatch.setattr(_threads, "_limit_blas", once(_threads._limit_blas, at))
        with pytest.raises(KeyboardInterrupt), _threads.blas_limited():
            assert at == 2
        assert _threads._blas_threads() == before == _threads.blas_threads()


@pytest.mark.parametrize("at", [1, 3])
def test_load_parameters(at, place, monkeypatch):
    """All parameters of a layer with children are replaced, or none."""
    layer, other = (pa.MultiHeadAttention(4, 2, seed=seed, backend=place) for seed in (0, 1))
    before = layer.parameters()
    with monkeypatch.context() as patch:
        assign = once(pa.Projection._assign, at)
        patch.setattr(pa.Projection, "_assign", lambda *given: assign(*given))
        with pytest.raises(KeyboardInterrupt):
            layer.load_parameters(other.parameters())
    assert all(x is before[name] for name, x in layer.parameters().items())


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("lengths", ["equal", "different"])
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_sliding_cache(name, lengths, at, native, host, monkeypatch):
    """Where the library writes in place, the ring buffer has the older positions again that were overwritten."""
    pytest.importorskip(name, reason="its library is not installed")
    x = np.random.default_rng(0).standard_normal((2, 1, 9, 4))
    cache = pa.SlidingKVCache.create(2, 1, window=3, head_dim=4, chunk=4, dtype="float64", backend=name)
    cache = cache.append(*(native(name, x[:, :, :7]),) * 2)
    if lengths == "different":
        cache = cache.rewind(np.array([1, 0]))
    q, new = native(name, x[:, :, :1]), native(name, x[:, :, 7:])
    want = [host(cache.copy().rewind(n).attention(q)) for n in range(3)]
    kind = type(registry.ready(name))
    with monkeypatch.context() as patch:
        put = once(kind.update_slice, at)
        patch.setattr(kind, "update_slice", lambda *given: put(*given))
        with pytest.raises(KeyboardInterrupt):
            cache.append(new, new)
    assert np.array_equal([host(cache.copy().rewind(n).attention(q)) for n in range(3)], want)
