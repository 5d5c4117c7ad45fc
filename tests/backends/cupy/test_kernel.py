"""The kernel of the CuPy backend, run on the host with a stand-in for CuPy: on a machine with a GPU the kit runs it.

What this proves: the loops, tiles, shapes and strides of the kernel; the arguments of each
cuBLAS call, against the documented formula on raw memory; and the device code itself, compiled
by the host's compiler and run thread by thread. That the kernel looks at no value (it would wait
for the device), and reads nothing that it has not written.

What it does not: that CuPy, cuBLAS and the driver behave as documented; how fast it is; the rounding
of the device's exp and tanh; races between threads that only a device runs at once.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import polyattn as pa
import polyattn_cupy
from polyattn import registry
from polyattn.kernels import GENERIC, Problem, Sizes
from polyattn.testing import assert_close
from polyattn.testing import references as ref
from polyattn.testing.cases import CASES
from polyattn_cupy._kernel import CublasKernel

ON_HOST = Path(__file__).parent / "on_host"
NUMPY = type(registry.ready("numpy"))
NVCC = shutil.which("nvcc")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler, which stands in for CUDA's here"
)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("device-code")


@pytest.fixture
def cupy(built, monkeypatch):
    """The stand-in as ``cupy``, and the kernel on it as NumPy's own."""
    for name in ("cupy", "polyattn_cupy._device", "polyattn_cupy._tiles", "polyattn_cupy._work"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(ON_HOST)
    import kernel_on_host

    cupy = sys.modules["cupy"] = kernel_on_host.on_host.Cupy(built)
    monkeypatch.setattr(NUMPY, "kernels", (kernel_on_host.OnHost(),))
    yield cupy
    for name in set(sys.modules) - before:
        if name.startswith(("cupy", "polyattn_cupy", "kernel_on_host")):
            del sys.modules[name]


@pytest.fixture
def tiny(cupy, monkeypatch):
    """Tiles of 2 queries and 4 keys of one batch entry."""
    import kernel_on_host

    import polyattn_cupy._work as work

    for name, value in kernel_on_host.TINY.items():
        monkeypatch.setattr(work, name, value)


def run(inputs, dout, dlse=None, **arguments):
    """Return ``out``, ``lse`` and the gradients."""
    out, cache = pa.attention_forward(*inputs, kernel="cublas", **arguments)
    return out, cache.lse, pa.attention_backward(dout, cache, dlse=dlse)


def check(inputs, dout, what="", **arguments):
    """Compare all results in float64 with the reference, which never touches what is excluded, and hides nothing."""
    out, lse, grads = run(inputs, dout, **arguments)
    expected = ref.attention(*inputs, **arguments)
    assert_close(out, expected.out, what=f"out, {what}")
    assert_close(lse, expected.lse, what=f"lse, {what}")
    slopes = ref.attention_gradients(dout, *inputs, **arguments)
    for gradient, slope, of in zip(grads, slopes, grads._fields, strict=True):
        assert (gradient is None) == (slope is None)
        if gradient is not None:
            # whether a sum is infinite or NaN may depend on its order; whether it is finite does not
            got, want = (np.where(np.isfinite(x), x, np.nan) for x in (gradient, slope))
            assert_close(got, want, what=f"gradient of {of}, {what}")


@needs_compiler
@pytest.mark.parametrize("tiles", ["one", "many"])
def test_the_conformance_kit(tmp_path, tiles):
    """Its checks of attention, with this kernel as NumPy's own; without those too long for the stand-in."""
    # end_of_the_range: scores that are out of range themselves; the kernel's backward does not have them
    names = ("attention", "caches", "extremes", "masks", "overflow")
    checks = [f"polyattn.testing.conformance.test_{name}" for name in names]
    plugins = ["-p", "polyattn.testing.plugin", "-p", "kernel_on_host", "-p", "no:cacheprovider"]
    chosen = [
        "--polyattn-backend=numpy",
        "-k",
        "not (large_batch or central or short_form or weights or end_of_the_range)",
    ]
    path = os.pathsep.join([str(ON_HOST), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "DEVICE_CODE": str(tmp_path), "TINY_TILES": "1" * (tiles == "many")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, "--pyargs", *checks, *chosen],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert next(tmp_path.glob("*/code.so"), None)


@needs_compiler
@pytest.mark.parametrize("tiles", ["one", "many"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "arguments",
    [
        {"causal": True},
        {"window": (1, None)},
        {"window": (1, 1)},
        {"key_lengths": np.array([3])},
        {"mask": np.arange(35).reshape(5, 7) % 3 > 0},
        {"segment_ids": (np.array([0, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 1, 1]))},
        {"causal": True, "softcap": 2.0, "sinks": np.zeros(2)},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_poison_reaches_what_sees_it_and_nothing_else(request, arguments, poison, tiles):
    """One entry of an operand that is not finite, in a row at either end and in between."""
    request.getfixturevalue("tiny" if tiles == "many" else "cupy")
    rng = np.random.default_rng(3)
    shapes = {"q": (1, 2, 5, 3), "k": (1, 1, 7, 3), "v": (1, 1, 7, 4), "dout": (1, 2, 5, 4)}
    for name in shapes:
        for row in (0, 2, 4):
            arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
            arrays[name][0, -1, row, 1] = poison
            dout, *inputs = arrays.pop("dout"), *arrays.values()
            check(inputs, dout, f"{name} {row}", **arguments)


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_scores_of_minus_infinity():
    """Beside a finite score they have no weight, in whichever tile they are; alone they are NaN."""
    q, v, dout = np.ones((1, 3, 1)), np.arange(6.0).reshape(1, 6, 1), np.ones((1, 3, 1))
    for finite in (0, 5):
        k = np.full((1, 6, 1), -np.inf)
        k[0, finite] = 1.0
        assert_close(run((q, k, v), dout)[0], np.full((1, 3, 1), float(finite)))
    out, lse, _ = run((q, np.full((1, 6, 1), -np.inf), v), dout)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@needs_compiler
@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("n_k", [127, 129, 700])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_several_warps(monkeypatch, n_k, bias):
    """Up to 300 keys are rows of three warps; with values of 200 features a thread has several columns to rescale."""
    import polyattn_cupy._work as work

    monkeypatch.setattr(work, "SIDE", 300)
    monkeypatch.setattr(work, "SCORES", 300)
    rng = np.random.default_rng(n_k)
    inputs = [rng.standard_normal(shape) for shape in ((2, 3, 5), (1, n_k, 5), (1, n_k, 200))]
    arguments = {"bias": rng.standard_normal((2, 1, n_k))} if bias else {}
    check(inputs, rng.standard_normal((2, 3, 200)), causal=True, **arguments)


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_backward_of_another_kernels_forward(monkeypatch):
    import kernel_on_host

    monkeypatch.setattr(kernel_on_host.OnHost, "forward", lambda self, *arguments: GENERIC.forward(*arguments))
    problem = next(case for case in CASES if case.name == "everything").problem()
    check(problem.inputs, problem.dout, **problem.arguments)


@needs_compiler
@pytest.mark.usefixtures("tiny")
def test_inputs_of_any_layout_are_not_written():
    rng = np.random.default_rng(6)
    q, k, v, dout = (rng.standard_normal((n, 2, 3, 4)).transpose(1, 2, 0, 3)[..., ::-1] for n in (5, 7, 7, 5))
    before = [x.copy() for x in (q, k, v, dout)]
    check((q, k, v), dout, mask=(rng.random((7, 5)) < 0.7).T[None, :, ::-1], bias=rng.random((7, 1, 3)).T)
    for x, y in zip((q, k, v, dout), before, strict=True):
        np.testing.assert_array_equal(x, y)


@needs_compiler
@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("window", [(None, 0), (None, 2**40), (2**40, 0)])
@pytest.mark.parametrize(
    ("offset", "seen"),
    [
        (2**70, True),
        (-(2**70), False),
        (np.array([2**63 - 1]), True),
        (np.array([-(2**63)]), False),
        (np.array([2**64 - 1], dtype=np.uint64), True),
    ],
)
def test_positions_at_the_ends_of_their_types(offset, seen, window):
    """Far behind the keys a query sees all of them, unless the window ends before; far before them none."""
    seen = seen and window[0] is None
    rng = np.random.default_rng(8)
    inputs = [rng.standard_normal((1, 1, n, 3)) for n in (3, 4, 4)]
    out, lse, _ = run(inputs, inputs[0], q_offset=offset, window=window)
    assert_close(out, ref.attention(*inputs).out if seen else np.zeros((1, 1, 3, 3)))
    assert np.isfinite(lse).all() == seen


@needs_compiler
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("arguments", "visited"),
    [
        ({}, 8 * 4),
        ({"causal": True}, 2 * (1 + 2 + 3 + 4)),
        ({"causal": True, "window": (3, None)}, 2 + 3 * 4),
        ({"key_lengths": 5}, 8 * 2),
        ({"causal": True, "q_offset": -16}, 0),
    ],
    ids=str,
)
def test_tiles_that_are_excluded_are_not_visited(cupy, arguments, visited):
    """Two products a tile: the scores of 2 queries by at most 4 keys, and those times the values."""
    x = np.ones((4, 16, 4))
    pa.attention(x, x, x, kernel="cublas", **arguments)
    assert len(cupy.products) == 2 * visited


@pytest.mark.usefixtures("cupy")
def test_memory_grows_with_the_length_not_its_square():
    from polyattn_cupy._work import SCORES, Work

    for batch, heads, kv_heads, n in ((1, 8, 8, 65536), (64, 8, 2, 4096), (1, 128, 1, 16384), (4096, 8, 8, 64)):
        work = Work(Problem(None, Sizes((batch,), heads, kv_heads, n, n, 64, 64), "float32", "cuda:0", 0.125))
        assert SCORES // 4 <= work.scores <= SCORES
    decode = Work(Problem(None, Sizes((1,), 8, 8, 1, 4096, 64, 64), "float32", "cuda:0", 0.125))
    assert list(decode.key_tiles(decode.query_tiles[0])) == [slice(0, 4096)]


BATCHES = next(case for case in CASES if case.name == "broadcast-axes").problem()
REFUSED = {
    "it has no dropout": {"dropout": 0.5, "seed": 1},
    "it adds no float64 bias to the scores of float32 inputs": {"bias": np.zeros((5, 7))},
    "the mask's leading axes (3, 1) are broadcast in part": BATCHES.arguments,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_refuses(monkeypatch, reason):
    monkeypatch.setattr(NUMPY, "kernels", polyattn_cupy.CupyBackend.kernels)
    inputs = [x.astype("float32") for x in BATCHES.inputs]
    assert pa.explain(*inputs, **REFUSED[reason]).refusals[CublasKernel.name] == reason


@pytest.mark.skipif(NVCC is None, reason="no CUDA compiler, which alone can say that it takes the device code")
@pytest.mark.parametrize("types", [("float", "float"), ("float", "__half"), ("double", "double")])
def test_the_cuda_compiler_takes_the_device_code(tmp_path, types):
    source = Path(polyattn_cupy.__file__).with_name("_tile.cu")
    score, weight = types
    defined = [f"-DSCORE={score}", f"-DWEIGHT={weight}", f"-DBIAS={weight}", f"-DHALF={int(weight == '__half')}"]
    command = [NVCC, "-std=c++17", "-Werror", "all-warnings", "-ptx", *defined, str(source), "-o", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
