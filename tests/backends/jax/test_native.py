"""The native kernel on JAX's arrays: every option, JAX's transformations, and what is computed without the library."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from jax import export
from jax import numpy as jnp

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES
from polyattn_jax import _foreign, _kernel, _native
from polyattn_native import status
from polyattn_native._build import compilers
from polyattn_native._targets import SOURCES

pytestmark = pytest.mark.skipif(isinstance(status(), str), reason="there is no native library here")
TARGET = "polyattn_attention_forward"


def normal(*shapes, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype=dtype) for shape in shapes]


def by_jax(x):
    if isinstance(x, tuple):
        return tuple(map(by_jax, x))
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


@pytest.fixture
def alone(monkeypatch):
    """Results that the library is in doubt of are NaN, instead of those of another kernel."""

    def poisoned(valid, by_library, otherwise):
        return tuple(jnp.where(valid, y, jnp.nan) for y in by_library)

    monkeypatch.setattr(_native, "replaced", poisoned)
    _kernel._compiled.cache_clear()
    yield
    _kernel._compiled.cache_clear()


def results(kernel, q, k, v, **arguments):
    """Return out, lse and all gradients."""
    out, cache = pa.attention_forward(q, k, v, kernel=kernel, **arguments)
    dout, dlse = (jnp.asarray(np.linspace(-1, 1, y.size).reshape(y.shape), dtype=y.dtype) for y in (out, cache.lse))
    return out, cache.lse, *pa.attention_backward(dout, cache, dlse)


LEFT = ("large-scores",)
"""Of so large scores the library does not compute the backward."""


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if case.name not in LEFT])
def test_every_case(case, alone):
    problem = case.problem()
    arguments = {name: by_jax(x) for name, x in problem.arguments.items()}
    out, cache = pa.attention_forward(*map(jnp.asarray, problem.inputs), kernel="native", **arguments)
    expected = ref.attention(*problem.inputs, **problem.arguments)
    assert_close(np.asarray(out), expected.out.reshape(problem.dout.shape), what="out")
    grads = pa.attention_backward(jnp.asarray(problem.dout), cache, jnp.asarray(problem.dlse))
    want_cache = pa.attention_forward(*problem.inputs, kernel="plain", **problem.arguments)[1]
    want = pa.attention_backward(problem.dout, want_cache, problem.dlse)
    for name, dx, expected in zip(want._fields, grads, want, strict=True):
        assert (dx is None) == (expected is None)
        assert dx is None or assert_close(np.asarray(dx), expected, what=f"d{name}") is None


OPTIONS = {
    "alibi": lambda: {"bias": pa.alibi_bias(4)},
    "relative": lambda: {"bias": pa.relative_position_bias(normal((32, 4))[0]), "q_offset": jnp.array([[1], [-3]])},
    "blocks": lambda: {"mask": pa.block_mask(np.eye(2, 3, dtype=bool), block_size=4)},
    "prefix": lambda: {"mask": pa.prefix_mask(np.array([[2], [9]])), "causal": True},
    "bias": lambda: {"bias": normal((2, 1, 4, 1, 11))[0], "sinks": normal((4,))[0]},
    "dropout": lambda: {"dropout": 0.4, "seed": 2**40 + 3},
    "traced seed": lambda: {"dropout": 0.4, "seed": jnp.asarray(-5)},
    "lengths": lambda: {"key_lengths": jnp.array([[3], [10]]), "q_offset": 5, "causal": True, "softcap": 3.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, alone):
    inputs, arguments = normal((2, 1, 4, 7, 5), (2, 3, 2, 11, 5), (3, 2, 11, 6)), OPTIONS[name]()
    pairs = zip(results("native", *inputs, **arguments), results("jit", *inputs, **arguments), strict=True)
    for i, (got, want) in enumerate(pairs):
        assert (got is None) == (want is None)
        if got is not None:
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert_close(np.asarray(got), np.asarray(want), what=str(i))


def test_numbers_for_arrays(alone):
    """A prefix, a mask and a bias without axes, and inputs without batch axes."""
    for arguments in ({"mask": pa.prefix_mask(1)}, {"mask": jnp.asarray(True), "bias": jnp.asarray(0.5)}):
        inputs = normal((2, 3, 4), (2, 5, 4), (2, 5, 4))
        pairs = zip(results("native", *inputs, **arguments), results("jit", *inputs, **arguments), strict=True)
        for got, want in pairs:
            assert (got is None) == (want is None)
            if got is not None:  # the gradient of the bias is zero but for rounding
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_narrow_dtypes(dtype, alone):
    inputs, sinks, bias = normal((2, 9, 8), (2, 70, 8), (2, 70, 8), dtype=dtype), *normal((2,), (9, 70), dtype=dtype)
    got = results("native", *inputs, sinks=sinks, bias=bias)
    *wide, sinks, bias = (x.astype("float64") for x in (*inputs, sinks, bias))
    want = results("jit", *wide, sinks=sinks, bias=bias)
    for x, y in zip(got, want, strict=True):
        assert_close(np.asarray(x.astype("float32")), np.asarray(y), dtype)


# ---- transformations ---------------------------------------------------------------------------------------------


def squared(kernel, q, k, v, **arguments):
    return jnp.sum(pa.attention(q, k, v, kernel=kernel, **arguments) ** 2)


Q, K, V, BIAS, SINKS, TABLE = normal(
    (3, 2, 4, 9, 8), (3, 2, 2, 11, 8), (3, 2, 2, 11, 8), (3, 4, 9, 11), (3, 4), (3, 32, 4)
)
MANY = normal((2, 2, 2, 2, 2, 2, 3, 4))[0]
MAPPED = {
    "all": lambda kernel: jax.vmap(lambda *x: pa.attention(*x, kernel=kernel))(Q, K, V),
    "twice": lambda kernel: jax.vmap(jax.vmap(lambda *x: pa.attention(*x, kernel=kernel)))(Q, K, V),
    "q": lambda kernel: jax.vmap(lambda q: pa.attention(q, K[0], V[0], kernel=kernel))(Q),
    "k": lambda kernel: jax.vmap(lambda k: pa.attention(Q[0], k, V[0], kernel=kernel))(K),
    "one": lambda kernel: jax.vmap(lambda q: pa.attention(q, K[0], V[0], kernel=kernel))(Q[:1]),
    "offset": lambda kernel: jax.vmap(
        lambda at, q: pa.attention(q, K[0], V[0], kernel=kernel, causal=True, q_offset=at)
    )(jnp.arange(3), Q),
    "seed": lambda kernel: jax.vmap(lambda s: pa.attention(Q, K, V, kernel=kernel, dropout=0.4, seed=s))(jnp.arange(3)),
    "mask": lambda kernel: jax.vmap(lambda x, q: pa.attention(q, K[0], V[0], kernel=kernel, mask=x < 0.3))(BIAS, Q),
    "many axes": lambda kernel: jax.vmap(lambda x: pa.attention(x, x, x, kernel=kernel))(MANY),
    "gradients of q": lambda kernel: jax.vmap(jax.grad(lambda q: squared(kernel, q, K[0], V[0])))(Q),
    "gradients of k": lambda kernel: jax.vmap(jax.grad(lambda k: squared(kernel, Q[0], k, V[0])))(K),
    "gradients of one bias": lambda kernel: jax.vmap(
        jax.grad(lambda bias, q: squared(kernel, q, K[0], V[0], bias=bias)), (None, 0)
    )(BIAS[0], Q),
    "gradients of biases": lambda kernel: jax.vmap(
        jax.grad(lambda bias, q: squared(kernel, q, K[0], V[0], bias=bias))
    )(BIAS, Q),
    "gradients of sinks": lambda kernel: jax.vmap(
        jax.grad(lambda sinks, q: squared(kernel, q, K[0], V[0], sinks=sinks))
    )(SINKS, Q),
    "gradients of one table": lambda kernel: jax.vmap(
        jax.grad(lambda t, q: squared(kernel, q, K[0], V[0], bias=pa.relative_position_bias(t))), (None, 0)
    )(TABLE[0], Q),
    "gradients of tables": lambda kernel: jax.vmap(
        jax.grad(lambda t, q: squared(kernel, q, K[0], V[0], bias=pa.relative_position_bias(t)))
    )(TABLE, Q),
    "Jacobian": lambda kernel: jax.jacrev(lambda q: pa.attention(q, K[0, 0], V[0, 0], kernel=kernel))(Q[0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPPED)
def test_mapped(name, alone):
    assert_close(np.asarray(jax.jit(MAPPED[name], static_argnums=0)("native")), np.asarray(MAPPED[name]("jit")))


def test_second_derivatives_and_forward_mode(alone):
    def of(kernel, q):
        return squared(kernel, q, K[0, 0, :1], V[0, 0, :1], causal=True)

    q = Q[0, 0, :1, :3]
    for derivative in (jax.hessian, jax.jacfwd):
        got, want = (derivative(lambda q, kernel=kernel: of(kernel, q))(q) for kernel in ("native", "scan"))
        assert_close(np.asarray(got), np.asarray(want))


def test_loops_and_checkpoints(alone):
    def total(kernel, q):
        def body(carry, x):
            return carry + jax.checkpoint(lambda x: squared(kernel, x, K[0], V[0]))(x), None

        return jax.lax.scan(body, 0.0, q)[0]

    got, want = (jax.jit(jax.grad(lambda q, kernel=kernel: total(kernel, q)))(Q) for kernel in ("native", "scan"))
    assert_close(np.asarray(got), np.asarray(want))


def test_without_jit():
    with jax.disable_jit():
        out = pa.attention(Q, K, V, kernel="native")
    assert_close(np.asarray(out), np.asarray(pa.attention(Q, K, V, kernel="native")))


def test_donated_arrays():
    x, want = Q[0] + 0, pa.attention(Q[0], K[0], V[0])
    call = jax.jit(lambda q: pa.attention(q, K[0], V[0]), donate_argnums=0)
    assert_close(np.asarray(call(x)), np.asarray(want))
    assert x.is_deleted()


# ---- doubt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [lambda q: q.at[1, 0, 0, 0, 0].set(jnp.nan), lambda q: q.at[2, 1].multiply(1e200), lambda q: q.at[0].set(jnp.inf)],
    ids=["NaN", "large", "infinite"],
)
def test_doubtful_inputs(change):
    """The scan computes what the library is in doubt of, in eager calls, mapped, and in the backward."""
    mask, q = jnp.asarray(np.tri(9, 11, dtype=bool)), change(Q)
    for function in (
        lambda kernel: pa.attention(q, K, V, mask=mask, kernel=kernel),
        lambda kernel: jax.jit(jax.vmap(lambda *x: pa.attention(*x, mask=mask, kernel=kernel)))(q, K, V),
        lambda kernel: jax.grad(lambda v: squared(kernel, q, K, v, mask=mask))(V),
    ):
        np.testing.assert_allclose(function("native"), function("scan"), rtol=1e-9, atol=1e-12)


# ---- where there is no call ----------------------------------------------------------------------------------------


def test_an_exported_program_runs_without_the_library():
    function = jax.jit(lambda q: pa.attention(q, K[0], V[0], kernel="native"))
    assert TARGET in function.lower(Q[0]).as_text()
    exported = export.export(function, platforms=["cpu", "cuda"])(Q[0])
    assert TARGET not in exported.mlir_module()
    assert_close(np.asarray(exported.call(Q[0])), np.asarray(function(Q[0])))


def test_it_is_chosen():
    explained = pa.explain(Q, K, V)
    assert pa.attention_forward(Q, K, V)[1].kernel == explained.kernel == "native"
    assert explained.notes[0].startswith(f"native kernels for {status().instruction_set}")


def test_no_library(monkeypatch):
    monkeypatch.setattr(_foreign, "missing", lambda: "it is not built")
    explained = pa.explain(Q, K, V)
    assert (explained.kernel, explained.refusals["native"]) == ("scan", "it is not built")
    assert explained.notes == ("no native kernels: it is not built",)
    with pytest.raises(pa.KernelUnsupportedError, match="not built"):
        pa.attention(Q, K, V, kernel="native")


def test_another_version_of_jaxlib(monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("the API version (0.1) is incompatible\nwith others")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    reason = _foreign.missing.__wrapped__()
    assert reason == "this jaxlib does not accept the native functions: the API version (0.1) is incompatible"


def test_traced_arrays_of_another_platform(monkeypatch):
    monkeypatch.setattr(_foreign, "platform", lambda: "gpu")
    x = np.ones((2, 3, 4))
    with pytest.raises(pa.KernelUnsupportedError, match="traced arrays are on gpu"):
        jax.jit(lambda x: pa.attention(x, x, x, kernel="native"))(x)


def test_a_number_of_threads_that_is_none(monkeypatch):
    monkeypatch.setenv("POLYATTN_NUM_THREADS", "many")
    with pytest.raises(pa.ArgumentError, match="expected a number of threads"):
        pa.attention(Q, K, V)
    assert pa.explain(np.ones((2, 3)), np.ones((2, 3)), np.ones((2, 3))).notes[0].startswith("no native kernels")


def test_a_program_of_another_version():
    """A compiled program may outlive the library, in a cache on disk."""
    assert _foreign.missing() is None
    call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), np.int32))
    with pytest.raises(Exception, match="compiled by another version of polyattn"):
        call(Q, fields=np.zeros(1, dtype=np.int64), structure=np.zeros(3, dtype=np.int64)).block_until_ready()


def test_calls_at_once():
    problems = [normal(*[(4, 60 + 20 * i, 16)] * 3, dtype="float32") for i in range(4)]
    want = [pa.attention(*problem) for problem in problems]
    together = jax.jit(lambda problems: [pa.attention(*problem) for problem in problems])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: together(problems), range(12)))
    for results_ in found:
        for got, expected in zip(results_, want, strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.skipif(not any(True for _ in compilers()), reason="there is no C++ compiler")
def test_structures_are_those_of_jaxlib(tmp_path):
    """xla_ffi.h declares the structures of c_api.h with names of our own; the compiler compares their offsets."""
    fields = {
        "CallFrame Frame": "api=api ctx=context stage=stage args=arguments rets=results attrs=attributes",
        "Args List<xla::Buffer>": "size=size types=types args=items",
        "Rets List<xla::Buffer>": "size=size types=types rets=items",
        "Attrs Attributes": "size=size types=types names=names attrs=items",
        "Buffer Buffer": "dtype=dtype data=data rank=rank dims=shape",
        "Array Array": "dtype=dtype size=size data=data",
        "Api Api": "api_version=version XLA_FFI_Error_Create=create_error XLA_FFI_Error_Destroy=destroy_error "
        "XLA_FFI_ThreadPool_NumThreads=thread_count",
        "Metadata_Extension MetadataExtension": "metadata=metadata",
        "Metadata Metadata": "api_version=version",
        "Error_Create_Args ErrorArguments": "message=message errc=code",
        "Error_Destroy_Args ErrorDestroyArguments": "error=error",
        "ThreadPool_NumThreads_Args ThreadsArguments": "ctx=context num_threads=threads",
    }
    lines = ['#include "xla/ffi/api/c_api.h"', '#include "xla_ffi.h"']
    for kinds, pairs in fields.items():
        theirs, ours = kinds.split()
        for pair in pairs.split():
            field, own = pair.split("=")
            lines.append(f"static_assert(offsetof(XLA_FFI_{theirs}, {field}) == offsetof(xla::{ours}, {own}));")
    for code, name in ((11, "F32"), (12, "F64")):
        lines.append(f"static_assert(XLA_FFI_DataType_{name} == {code} && xla::FLOAT{name[1:]} == {code});")
    source = tmp_path / "same.cpp"
    source.write_text("\n".join(lines))
    compiler = next(compilers()).command
    folders = ["-I", jax.ffi.include_dir(), "-I", str(SOURCES)]
    done = subprocess.run([*compiler, "-std=c++17", "-fsyntax-only", *folders, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
