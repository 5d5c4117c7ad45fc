"""Interrupted calls.

KeyboardInterrupt and exceptions that another thread raises, at random moments of calls in each library; and calls for
whose arrays there is no memory. What is tried stands in the programs of tests/programs that run here.
"""

import json
import sys

import pytest

OFTEN = {"numpy": (60, 1500), "torch": (30, 800), "jax": (0, 30), "array-api-strict": (0, 150)}


def pytest_generate_tests(metafunc):
    if "backend" in metafunc.fixturenames:
        long = metafunc.config.getoption("--long")
        names = {name for name, counts in OFTEN.items() if counts[long]}
        if metafunc.function is test_no_memory:
            names -= {"jax"}  # it takes memory that it kept from the call before: of 200 calls none failed
        metafunc.parametrize("backend", sorted(names))


def interrupted(program, tried, seed, what, backend, kind, count, **variables):
    """Interrupt calls in a process of its own; it fails if one leaves anything changed."""
    found = json.loads(program("interrupted", backend, kind, str(count), str(seed), timeout=1200, **variables))
    times = sum(inside for inside, _ in found.values())
    assert times >= count * len(found) / 10, found  # the others were interrupted just before or after
    tried(f"{what} in {backend}", times, "the state as before or after the call, the next call right")


def test_keyboard_interrupts(program, amount, tried, request, backend):
    seed = request.config.getoption("--seed")
    interrupted(program, tried, seed, "KeyboardInterrupt", backend, "signal", amount(*OFTEN[backend]))


def test_exceptions_of_another_thread(program, amount, tried, request, backend):
    seed = request.config.getoption("--seed")
    interrupted(program, tried, seed, "exceptions from another thread", backend, "exception", amount(*OFTEN[backend]))


def test_interrupts_of_threads_in_python(program, amount, tried, request):
    """Without the native library NumPy's kernels run on a thread pool of Python."""
    seed, count = request.config.getoption("--seed"), amount(40, 1500)
    what = "KeyboardInterrupt on threads of Python"
    interrupted(program, tried, seed, what, "numpy", "signal", count, POLYATTN_NATIVE="0")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
def test_no_memory(backend, program, amount, tried, request):
    """The limit is between nothing and what a call needs; threads cannot start then either."""
    count, seed = amount(6, 200), request.config.getoption("--seed")
    failed, _ = json.loads(program("out_of_memory", backend, str(count), str(seed), timeout=1200))
    assert failed >= 1
    tried(f"calls without memory in {backend}", failed, "MemoryError, or the library's with the bytes; all as before")
