"""Forks, started processes and interpreters.

A process forks while another thread computes; processes are started by spawn and forkserver; and a second interpreter
runs in the process.
"""

import os
import sys

import numpy as np
import pytest

import polyattn as pa

FORKS = {"numpy": (15, 400), "torch": (5, 200), "array-api-strict": (5, 200)}
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def forked(program, request, name, count, **variables):
    program("fork_while_busy", name, str(count), str(request.config.getoption("--seed")), **variables)


@needs_fork
@pytest.mark.parametrize("name", FORKS)
def test_forks_while_a_thread_computes(name, program, amount, tried, request):
    """torch itself hangs in a child if its own threads have run before; with one thread it has none."""
    count = amount(*FORKS[name])
    forked(program, request, name, count, OMP_NUM_THREADS="1")
    tried(f"forks while another thread computes on {name}", count, "parent and child go on with the same bits")


@needs_fork
def test_forks_with_threads_of_python(program, amount, tried, request):
    count = amount(10, 300)
    forked(program, request, "numpy", count, POLYATTN_NATIVE="0", OMP_NUM_THREADS="2")
    tried("forks while threads of Python compute on numpy", count, "parent and child go on with the same bits")


@pytest.mark.parametrize("method", ["spawn", "forkserver"] if hasattr(os, "fork") else ["spawn"])
def test_started_processes(method, program, amount, tried):
    names = amount(("numpy",), ("numpy", "torch", "array-api-strict"))
    count = int(program("started_processes", method, str(amount(2, 100)), *names))
    tried(f"tasks with layers in processes started by {method}", count, "no selection but their own, the same bits")


def test_interpreters(program, tried):
    """NumPy loads in one interpreter of a process; if that has a lock of its own, as from Python 3.12 on, in none."""
    x = np.arange(8000, dtype=np.float32).reshape(2, 40, 100) % 13
    out, cache = pa.attention_forward(x, x, x, causal=True)
    bits = f"{out.tobytes().hex()} {pa.attention_backward(out, cache).q.tobytes().hex()}"
    assert program("subinterpreter", "beside") == "refused by NumPy"
    assert program("subinterpreter", "alone") == (bits if sys.version_info < (3, 12) else "refused by NumPy")
    tried("second interpreters", 2, "the same bits where NumPy loads, else the ImportError by which NumPy refuses it")
