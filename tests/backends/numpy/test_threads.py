"""The threads of NumPy's kernels and the guard that holds NumPy's BLAS to one: shared, restored, safe after a fork."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import polyattn as pa
from polyattn.testing import assert_close
from polyattn_native._threads import _blas, _blas_threads, blas_limited
from polyattn_numpy import _blocked, _threads


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads for every problem, however few cores the machine has."""
    monkeypatch.setattr(_blocked, "WORTHWHILE", 0)
    monkeypatch.setattr(_blocked, "thread_count", lambda: 3)


def blas_threads() -> int:
    return _blas_threads()


def problem(n: int = 300) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 4, n, 16)).astype(np.float32) for _ in range(3)]


def test_the_blas_is_numpys_own() -> None:
    assert "numpy" in _blas().filepath


def test_each_task_is_done_once_and_the_blas_has_one_thread_meanwhile() -> None:
    seen: list[int] = []
    held: list[int] = []
    with threadpool_limits(2, user_api="blas"):

        def worker():
            return lambda task: (seen.append(task), held.append(blas_threads()))

        _threads.run(worker, range(100), 3)
        assert sorted(seen) == list(range(100))
        assert set(held) == {1}
        assert blas_threads() == 2


@pytest.mark.parametrize("where", ["caller", "other"])
def test_a_failure_in_any_thread_reaches_the_caller_and_everything_is_restored(where: str) -> None:
    caller = threading.current_thread()
    both = threading.Barrier(2, timeout=30)
    done: list[int] = []

    def worker():
        def work(task: int) -> None:
            if task < 2:
                both.wait()  # each thread has one of the first two tasks
                if (threading.current_thread() is caller) == (where == "caller"):
                    raise ZeroDivisionError("in a task")
            done.append(task)

        return work

    with threadpool_limits(2, user_api="blas"):
        with pytest.raises(ZeroDivisionError, match="in a task"):
            _threads.run(worker, range(100_000), 2)
        assert blas_threads() == 2
        assert len(done) < 100_000  # what was not begun was dropped
        again: list[int] = []
        _threads.run(lambda: again.append, range(10), 2)
        assert sorted(again) == list(range(10))


def test_a_failing_kernel_raises_in_the_caller(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 1.00 TiB")

    q, k, v = problem()
    want = pa.attention(q, k, v, kernel="blocked")
    before = blas_threads()
    with monkeypatch.context() as patch:
        patch.setattr(_blocked.Forward, "task", fail)
        with pytest.raises(MemoryError, match="TiB"):
            pa.attention(q, k, v, kernel="blocked")
    assert blas_threads() == before
    assert np.array_equal(pa.attention(q, k, v, kernel="blocked"), want)


def test_calls_from_many_threads_at_once(threads: None) -> None:
    q, k, v = problem()
    want = pa.attention(q, k, v, causal=True, kernel="blocked")
    with threadpool_limits(2, user_api="blas"):
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _: pa.attention(q, k, v, causal=True, kernel="blocked"), range(40)))
        assert all(np.array_equal(x, want) for x in results)
        assert blas_threads() == 2


def test_limits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    with threadpool_limits(4, user_api="blas"):
        monkeypatch.delenv("POLYATTN_NUM_THREADS", raising=False)
        assert _threads.thread_count() == 4
        with blas_limited():  # by another call: what it holds is not the limit
            assert _threads.thread_count() == 4
        monkeypatch.setenv("POLYATTN_NUM_THREADS", "3")
        assert _threads.thread_count() == 3
        with threadpool_limits(1, user_api="blas"):
            assert _threads.thread_count() == 1
        monkeypatch.setenv("POLYATTN_NUM_THREADS", "1")
        with _threads.blas_within_limit():
            assert blas_threads() == 1
        assert blas_threads() == 4


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_bad_number_of_threads(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_NUM_THREADS", value)
    q, k, v = problem(600)
    with pytest.raises(pa.ArgumentError, match=f"POLYATTN_NUM_THREADS: expected a number of threads, .* got '{value}'"):
        pa.attention(q, k, v)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_after_a_fork(program: Any) -> None:
    program("fork_with_threads")


def test_at_the_interpreters_exit_it_works_alone(program: Any) -> None:
    assert program("at_exit") == "(1, 4, 300, 16)"


def test_nothing_is_warned_about_in_any_thread(threads: None) -> None:
    q, k, v = problem()
    out = pa.attention(q * np.float32(1e30), k, v, causal=True, q_offset=-5)
    assert_close(out[:, :, :5], np.zeros_like(out[:, :, :5]), "float32")
