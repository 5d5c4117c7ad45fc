"""JAX: 32-bit mode, traced arrays, and sixteen threads that need it first, each in a process of its own."""

import contextlib
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import polyattn as pa
from polyattn import functional as F

jax = pytest.importorskip("jax", reason="jax is not installed")


def run(code, **environment):
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("POLYATTN_", "JAX_"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "done", done.stderr


def test_thirty_two_bits():
    """float64 is a DTypeError that says how to enable it; integers that fit go over narrowed; no flag is set."""
    run("""
        import numpy as np, polyattn as pa
        from polyattn import functional as F
        def refused(call, kind, *words):
            try: call()
            except kind as error: assert all(word in str(error) for word in words), error
            else: raise AssertionError(words)
        x = np.linspace(-1, 1, 24).reshape(1, 2, 3, 4)
        how = ('jax.config.update("jax_enable_x64", True)', "JAX_ENABLE_X64=1")
        refused(lambda: pa.to_backend(x, "jax"), pa.DTypeError, "x: jax is in 32-bit mode and has no float64", *how)
        refused(lambda: pa.attention(x, x, x, backend="jax"), pa.DTypeError, "q: ", *how)
        refused(lambda: pa.Projection(4, 4, dtype="float64", backend="jax"), pa.DTypeError, *how)
        refused(lambda: pa.LayerNorm(4, backend="jax")(x), pa.DTypeError, "x: expected float32")
        refused(lambda: pa.to_backend(np.arange(3), "jax"), pa.DTypeError, "x: ", "int64")
        for kind in (np.int64, np.uint32, np.uint64, np.int32, np.int16):
            small = x.astype(np.float32)
            lengths, labels = np.array([2], kind), np.array([[0, 3, 1], [2, 2, 0]], kind)
            ids = np.array([0, 0, 1], kind)
            arguments = {"key_lengths": lengths, "segment_ids": (ids, ids), "mask": np.tri(3, dtype=bool)}
            out = pa.attention(small, small, small, backend="jax", **arguments)
            assert np.allclose(out, pa.attention(small, small, small, **arguments), atol=1e-6)
            with pa.use_backend("jax"), pa.transfers() as account:
                loss, cache = F.cross_entropy_forward(small[0], labels)
                grads = F.cross_entropy_backward(np.ones_like(loss), cache)
            assert np.allclose(loss, F.cross_entropy(small[0], labels), atol=1e-6) and grads.labels is None
            crossing = account.crossings[1]
            assert crossing.what == "labels" and (crossing.copied or kind in (np.int32, np.int16, np.uint32))
        huge = np.array([0, 2**40, 1])
        refused(lambda: pa.attention(small, small, small, backend="jax", segment_ids=(huge, huge)), pa.DTypeError,
                "q_segments: its values do not fit int32", "int64")
        with pa.transfers("forbid"):
            refused(lambda: pa.attention(small, small, small, backend="jax"), pa.BackendMismatchError, "q: would go")
        layer = pa.Projection(4, 4, seed=1, backend="jax")
        assert np.array_equal(layer.parameters()["weight"], pa.Projection(4, 4, seed=1).parameters()["weight"])
        import jax
        assert not jax.config.jax_enable_x64
        print("done")
    """)


def test_an_integer_argument_alone_is_forbidden_too():
    """Narrowing is a crossing like any other: refused before it, counted after it."""
    run("""
        import numpy as np, polyattn as pa, jax.numpy as jnp
        from polyattn.conversion import move_argument, place_of
        labels = np.array([1, 2])
        home, place = place_of({"labels": labels}), place_of({"x": jnp.zeros(2)})
        with pa.transfers("forbid") as account:
            try: move_argument(labels, place, name="labels", home=home)
            except pa.BackendMismatchError as error: assert str(error).startswith("labels: would go from numpy"), error
            else: raise AssertionError
        assert account.count == 0
        with pa.transfers() as account:
            there = move_argument(labels, place, name="labels", home=home)
        assert there.dtype == "int32" and account.count == 1 and account.crossings[0].copied
        print("done")
    """)


def test_the_first_use_by_sixteen_threads():
    """JAX is imported, and told of our caches, once: a second telling would raise."""
    run("""
        import threading, numpy as np, polyattn as pa
        gate, faults = threading.Barrier(16), []
        def work(i):
            x = np.full((2, 3), i, dtype=np.float32)
            gate.wait()
            try:
                y, cache = pa.attention_forward(x, x, x, backend="jax")
                assert np.allclose(y, i) and cache.place.backend.name == "jax"
            except BaseException as error:
                faults.append(error)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not faults, faults
        print("done")
    """)


@pytest.mark.parametrize("selected", [None, "numpy", "torch", "array-api-strict"])
def test_traced_arrays_stay(selected):
    """Under jit, grad and vmap an array never leaves JAX, and nothing is counted; with nothing selected it computes."""
    if selected is not None and selected not in {info.name for info in pa.list_backends() if info.state == "ready"}:
        pytest.skip(f"{selected} is not installed")
    x = jax.numpy.linspace(0.0, 1.0, 12).reshape(3, 4)

    def loss(t):
        return jax.numpy.sum(F.softmax(t) ** 2)

    with contextlib.ExitStack() as stack:
        account = stack.enter_context(pa.transfers())
        if selected is not None:
            stack.enter_context(pa.use_backend(selected))
        for transform in (jax.jit, jax.grad, lambda f: jax.vmap(lambda row: f(row[None]))):
            if selected is None:
                transform(loss)(x)
            else:
                with pytest.raises(pa.BackendMismatchError, match=r"x: this array is being traced by JAX.*select jax"):
                    transform(loss)(x)
    assert account.count == 0


def test_traced_arguments_stay():
    """A traced mask beside concrete arrays is of the same library, so it computes; it does not leave either."""
    x, mask = jax.numpy.ones((3, 4)), np.tri(3, dtype=bool)
    compiled = jax.jit(lambda mask: pa.attention(x, x, x, mask=mask))
    np.testing.assert_allclose(compiled(mask), pa.attention(x, x, x, mask=jax.numpy.asarray(mask)))
    with pytest.raises(pa.BackendMismatchError, match="mask: this array is being traced"):
        jax.jit(lambda mask: pa.attention(x, x, x, mask=mask, backend="numpy"))(mask)


def test_a_cache_crosses_jit_with_its_place():
    x = jax.numpy.linspace(0.0, 1.0, 12).reshape(3, 4)
    y, cache = jax.jit(lambda t: F.softmax_forward(t))(x)
    (dx,) = jax.jit(F.softmax_backward)(jax.numpy.ones_like(y), cache)
    assert cache.place.backend.name == "jax"
    np.testing.assert_allclose(dx, np.zeros((3, 4)), atol=1e-7)


def test_a_new_seed_compiles_nothing():
    """A training step has a seed of its own each time; the mask is still that of the other libraries."""
    from polyattn_jax import _kernel

    x = np.random.default_rng(0).standard_normal((1, 6, 4)).astype(np.float32)
    before = _kernel._compiled.cache_info().misses
    for seed in (1, 2, -7):
        out = pa.attention(x, x, x, dropout=0.5, seed=seed, backend="jax")
        assert np.allclose(out, pa.attention(x, x, x, dropout=0.5, seed=seed), atol=1e-6)
    assert _kernel._compiled.cache_info().misses - before <= 1
