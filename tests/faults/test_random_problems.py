"""Random problems and calls.

Each problem of attention has any arguments, dtype, memory layout and special values, on arrays of every library. The
results agree with a float64 formula written apart. A wrong argument raises an exception of polyattn that names it.
"""

import importlib
import math
import random
import re

import ml_dtypes
import numpy as np
import pytest
from arrays_in_memory import opened
from attention_problems import problem
from attention_reference import Value
from small_tiles import in_tiles
from wrong_arguments import WRONG, call_with

import polyattn as pa
from polyattn.backend import dtype_name
from polyattn.kernels import candidates
from polyattn.testing import TOLERANCES, assert_close
from polyattn.testing.plugin import forget_programs

SMALL = {
    "numpy": {"polyattn_numpy._layout": {"ROWS": 5, "COLUMNS": 8, "SCORES": 40}},
    "torch": {"polyattn_torch._kernel": {"MASKED": 64, "LEAST": 2}},
}
"""Limits of the tiles of kernels, for which small problems need several tiles."""


@pytest.fixture
def small_tiles(monkeypatch):
    """Return ``small_tiles(backend)``, which makes the tiles of its kernels small."""

    def limit(backend):
        contract = opened(backend).contract
        monkeypatch.setattr(type(contract), "kernels", in_tiles(contract, 5, 8))
        for module, constants in SMALL[backend].items():
            for name, value in constants.items():
                monkeypatch.setattr(importlib.import_module(module), name, value)

    return limit


def compared(got, want, dtype, target, what, spread):
    """Compare an array of the library with the reference's result, in units of the size of its terms."""
    assert target.owns(got), f"{what}: expected an array of {target.name}, got {type(got)}"
    assert dtype_name(got.dtype) == dtype, f"{what}: expected {dtype}, got {dtype_name(got.dtype)}"
    limits = ml_dtypes.finfo(dtype)
    most, least = float(limits.max), float(limits.smallest_subnormal if limits.bits == 16 else limits.smallest_normal)
    with np.errstate(invalid="ignore"):
        host, value = (np.clip(np.asarray(x, dtype=np.float64), -most, most) for x in (target.to_np(got), want.value))
    wide = TOLERANCES["float64" if dtype == "float64" else "float32"]
    size = min(want.terms, most) * max(1, spread * wide / TOLERANCES[dtype] / 8) + 4 * least / TOLERANCES[dtype]
    assert_close(host, value, dtype, scale=size, what=what)


def solve(case, target, alone):
    """Compute a problem, compare all results, and return the name of the kernel."""
    inputs, arguments, upstream = case.native(target)
    dtype, answer = case.inputs["q"].dtype, case.answer()
    low, wide = dtype in ("float16", "bfloat16"), "float64" if dtype == "float64" else "float32"
    spread = 0.0 if case.exact else answer.spread
    out, cache = pa.attention_forward(*inputs, **arguments)
    compared(out, answer.out, dtype, target, "out", spread)
    compared(cache.lse, answer.lse, wide, target, "lse", spread)
    check_statistics(cache.row_statistics, answer, wide, target, spread)
    if alone:
        compared(pa.attention(*inputs, **arguments), answer.out, dtype, target, "attention(…)", spread)
    grads = pa.attention_backward(upstream["dout"], cache, upstream.get("dlse"))
    for name, got in grads._asdict().items():
        want = getattr(answer, name)
        assert (got is None) == (want is None), f"gradient of {name}: {got}, expected {want}"
        if got is not None:
            own = dtype if name in "qkv" else case.dtypes[name]
            # In 16 bits out is rounded before the backward reads it, and that adds up over the rows.
            coarse = max(TOLERANCES[dtype] * (4 if low else 1) / TOLERANCES[own], 1)
            want = Value(want.value, want.terms * coarse)
            compared(got, want, own, target, f"gradient of {name}", spread)
    for given, x in zip(case.inputs.values(), inputs, strict=True):
        assert np.array_equal(target.to_np(x), given.values, equal_nan=True), "an input was written to"
    return cache.kernel


def check_statistics(statistics, answer, wide, target, spread):
    """Compare the sum of the row statistics; where scores are large, to some units in the last place of the largest."""
    largest, log_total = (np.asarray(target.to_np(x), dtype=np.float64) for x in statistics)
    empty = np.isneginf(answer.log_total)
    assert np.array_equal(np.isneginf(log_total), empty), "row statistics: expected log_total −inf in empty rows only"
    with np.errstate(invalid="ignore"):
        difference = np.where(empty, largest, (largest - answer.largest) + (log_total - answer.log_total))
    expected = np.where(np.isnan(answer.log_total), math.nan, 0.0)
    size = 8 + spread + np.max(abs(answer.largest), initial=0, where=np.isfinite(answer.largest)) / 16
    assert_close(difference, expected, wide, scale=size, what="row statistics")


def failed(error, case, more=""):
    """Fail with the problem as a program."""
    pytest.fail(f"{type(error).__name__}: {error}\n{case.source()}\n{more}")


AMOUNTS = {"numpy": (1_000, 60_000), "torch": (300, 20_000), "jax": (40, 10_000), "array-api-strict": (100, 10_000)}
OTHERS = {
    "numpy": ("torch", "array-api-strict"),
    "torch": ("numpy",),
    "jax": (),
    "array-api-strict": ("numpy", "torch"),
}
"""Where a call may compute instead."""


@pytest.mark.parametrize("tiles", ["usual tiles", "small tiles"])
@pytest.mark.parametrize("backend", AMOUNTS)
def test_problems(backend, tiles, amount, tried, request, small_tiles):
    """Every result and gradient is that of the formula; a kernel that is forced may decline."""
    target, count, seed = opened(backend), amount(*AMOUNTS[backend]) // 2, request.config.getoption("--seed")
    kernels = [kernel.name for kernel in candidates(target.contract.kernels)]
    kinds = amount(1, 30) if backend == "jax" else None
    if tiles == "small tiles" and backend in SMALL:
        small_tiles(backend)
    first, declined = (0 if tiles == "usual tiles" else 10**6 + 1), 0
    for index in range(first, first + count):
        if index % 100 == 0:
            forget_programs()
        case = problem(target, seed, index, kinds, kernels, OTHERS[backend])
        try:
            solve(case, target, alone=index % 3 == 0)
        except pa.KernelUnsupportedError as error:
            if "kernel" not in case.elsewhere:
                failed(error, case)
            declined += 1
        except pa.DTypeError as error:
            if "has no dtype" not in str(error) or "backend" not in case.elsewhere:
                failed(error, case)
            declined += 1
        except Exception as error:
            failed(error, case)
    assert declined <= count / 5
    tried(f"problems of attention on {backend} with {tiles}", count, "every result and gradient is that of the formula")


@pytest.mark.parametrize("backend", AMOUNTS)
def test_wrong_arguments(backend, amount, tried, request):
    """A problem with one wrong argument raises one exception of polyattn, which names the argument."""
    target, count, seed = opened(backend), amount(100, 2_000), request.config.getoption("--seed")
    for index in range(count):
        if index % 100 == 0:
            forget_programs()
        case, draw = problem(target, seed, index, 1 if backend == "jax" else None), random.Random(index)
        wrong = draw.choice(WRONG)
        try:
            call_with(target, case, wrong)
        except wrong.error as error:
            if not re.search(rf"\b{wrong.name}\b", str(error)):
                failed(error, case, f"# {wrong.name}={wrong.value}: expected a message that names {wrong.name}")
        except Exception as error:
            failed(error, case, f"# {wrong.name}={wrong.value}: expected {wrong.error.__name__}")
        else:
            failed(AssertionError("nothing was raised"), case, f"# {wrong.name}={wrong.value}")
    tried(f"calls with a wrong argument on {backend}", count, "an exception of polyattn names the argument")


@pytest.mark.parametrize("backend", ["numpy", "torch", "array-api-strict"])
def test_a_failure_can_be_pasted(backend, request):
    """The program that a failure shows computes the same."""
    target = opened(backend)
    for index in range(20):
        case = problem(target, request.config.getoption("--seed"), index)
        found = {}
        exec(case.source(), found)
        inputs, arguments, _ = case.native(target)
        assert np.array_equal(
            *(target.to_np(x) for x in (found["out"], pa.attention(*inputs, **arguments))), equal_nan=True
        )
