"""Operations have no hidden state: forwards may be repeated, interleaved, threaded and compiled before a backward."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref

F = pa.functional
RNG = np.random.default_rng(23)


def draw() -> Any:
    """Return inputs of attention and its upstream gradient."""
    return [RNG.standard_normal((2, 5, 4)) for _ in range(4)]


def forward(make: Any, hosts: Any) -> Any:
    return pa.attention_forward(*(make(x) for x in hosts[:3]), causal=True)


def check(to_np: Any, grads: Any, hosts: Any) -> Any:
    want = ref.attention_gradients(hosts[3], *hosts[:3], causal=True)
    for name in ("q", "k", "v"):
        assert_close(to_np(getattr(grads, name)), getattr(want, name), what=f"gradient of {name}")


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 0)])
def test_two_forwards_before_their_backwards(make: Any, to_np: Any, order: Any) -> None:
    runs = [draw(), draw()]
    caches = [forward(make, hosts)[1] for hosts in runs]
    for i in order:
        check(to_np, pa.attention_backward(make(runs[i][3]), caches[i]), runs[i])


def test_a_cache_is_immutable(make: Any) -> None:
    _, cache = forward(make, draw())
    for name in ("arrays", "lse", "op"):
        with pytest.raises(AttributeError):
            setattr(cache, name, None)


def test_a_backward_leaves_its_cache_and_its_upstream_alone(make: Any, to_np: Any) -> None:
    hosts = draw()
    out, cache = forward(make, hosts)
    dout, lse, before = make(hosts[3]), to_np(cache.lse), to_np(out)
    for _ in range(2):
        check(to_np, pa.attention_backward(dout, cache), hosts)
    np.testing.assert_array_equal(to_np(dout), hosts[3])
    np.testing.assert_array_equal(to_np(cache.lse), lse)
    np.testing.assert_array_equal(to_np(out), before)


def test_the_cache_of_another_operation_is_refused(make: Any) -> None:
    x = make(np.zeros((2, 3)))
    _, cache = F.softmax_forward(x)
    with pytest.raises(pa.PolyattnError, match="cache"):
        F.relu_backward(x, cache)
    with pytest.raises(pa.PolyattnError, match="cache"):
        pa.attention_backward(x, cache)


def test_an_upstream_of_another_shape_or_dtype_is_refused(make: Any) -> None:
    _, cache = F.softmax_forward(make(np.zeros((2, 3))))
    with pytest.raises(pa.ShapeError, match="dy"):
        F.softmax_backward(make(np.zeros((3, 2))), cache)
    with pytest.raises(pa.DTypeError, match="dy"):
        F.softmax_backward(make(np.zeros((2, 3)), "float32"), cache)


def test_threads_do_not_meet(make: Any, to_np: Any) -> None:
    """Case 20: ten threads with constant arrays, plain and transposed, and with different problems."""
    problems = [draw() for _ in range(10)]

    def work(i: Any) -> Any:
        rows = make(np.full((64, 32), float(i)))
        plain = to_np(F.linear(rows, make(np.ones((32, 48)))))
        view = to_np(F.linear(rows, make(np.ones((48, 32))).T))
        done = []
        for _ in range(3):
            _, cache = forward(make, problems[i])
            done.append(pa.attention_backward(make(problems[i][3]), cache))
        return plain, view, done

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(10) as pool:
            results = list(pool.map(work, range(10)))
    finally:
        sys.setswitchinterval(interval)
    for i, (plain, view, done) in enumerate(results):
        np.testing.assert_array_equal(plain, np.full((64, 48), 32.0 * i))
        np.testing.assert_array_equal(view, plain)
        for grads in done:
            check(to_np, grads, problems[i])


def test_selection_in_threads(contract: Any, make: Any, to_np: Any) -> None:
    """Half of the threads select NumPy, half the backend; each thread computes on its own selection."""

    def work(i: Any) -> Any:
        name = contract.name if i % 2 else "numpy"
        with pa.use_backend(name):
            y, cache = F.softmax_forward(np.full((2, 3), float(i)))
        return name, cache.place.backend.name, y

    with ThreadPoolExecutor(8) as pool:
        for name, computed, y in pool.map(work, range(16)):
            assert computed == name
            assert_close(y, np.full((2, 3), 1 / 3))


def test_compiled_forward_and_backward(contract: Any, make: Any, to_np: Any) -> None:
    """The whole step in one compiled function."""
    hosts = draw()

    def step(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, cache = pa.attention_forward(q, k, v, causal=True)
        grads = pa.attention_backward(dout, cache)
        return out, (grads.q, grads.k, grads.v)

    compiled = contract.jit(step)

    out, slopes = compiled(*(make(x) for x in hosts))
    want = ref.attention_gradients(hosts[3], *hosts[:3], causal=True)
    assert_close(to_np(out), ref.attention(*hosts[:3], causal=True).out)
    for got, expected in zip(slopes, want[:3], strict=True):
        assert_close(to_np(got), expected)


def test_a_cache_crosses_the_compiler(contract: Any, make: Any, to_np: Any) -> None:
    """A cache is a result of one compiled function, and an argument of another or of an eager backward."""
    hosts = draw()
    native = [make(x) for x in hosts]
    _, cache = contract.jit(lambda q, k, v: pa.attention_forward(q, k, v, causal=True))(*native[:3])
    check(to_np, pa.attention_backward(native[3], cache), hosts)
    check(to_np, contract.jit(pa.attention_backward)(native[3], cache), hosts)
    eager = forward(make, hosts)[1]
    check(to_np, contract.jit(pa.attention_backward)(native[3], eager), hosts)


def test_compiled_isolation(contract: Any, make: Any, to_np: Any) -> None:
    """In compiled functions too, NaN at an excluded key has no effect, and NaN elsewhere is propagated."""
    hosts = draw()
    mask = np.array([True, True, True, True, False])

    def step(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, cache = pa.attention_forward(q, k, v, mask=make(mask, "bool"))
        return out, pa.attention_backward(dout, cache).k

    compiled = contract.jit(step)

    for key in (4, 1):
        poisoned = [x.copy() for x in hosts]
        poisoned[1][:, key] = poisoned[2][:, key] = np.nan
        out, dk = compiled(*(make(x) for x in poisoned))
        assert_close(to_np(out), ref.attention(*poisoned[:3], mask=mask).out)
        assert_close(to_np(dk), ref.attention_gradients(poisoned[3], *poisoned[:3], mask=mask).k)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm", "relu", "gelu", "silu"])
def test_compiled_operations(contract: Any, make: Any, to_np: Any, name: Any) -> None:
    x, dy = RNG.standard_normal((2, 5, 4)), RNG.standard_normal((2, 5, 4))

    def step(x: Any, dy: Any) -> Any:
        y, cache = getattr(F, f"{name}_forward")(x)
        return y, getattr(F, f"{name}_backward")(dy, cache)[0]

    compiled = contract.jit(step)

    y, cache = getattr(F, f"{name}_forward")(make(x))
    dx = getattr(F, f"{name}_backward")(make(dy), cache)[0]
    for got, want in zip(compiled(make(x), make(dy)), (y, dx), strict=True):
        assert_close(to_np(got), to_np(want))
