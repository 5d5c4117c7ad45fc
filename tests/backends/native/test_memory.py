"""Memory of results that is kept for later results."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from polyattn_native import _memory

SIZE = _memory.LEAST // 4
FLOAT = np.dtype(np.float32)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A memory of its own."""
    own = _memory._Memory()
    monkeypatch.setattr(_memory, "_memory", own)
    return own


def test_an_array_is_whole_and_aligned() -> None:
    x = _memory.empty((2, SIZE), FLOAT)
    x[:] = 1
    assert (x.shape, x.dtype, x.ctypes.data % 64) == ((2, SIZE), FLOAT, 0)
    assert x.flags.carray


def test_memory_is_used_again(memory: Any) -> None:
    x = _memory.empty((SIZE,), FLOAT)
    place = x.ctypes.data
    del x
    gc.collect()
    assert len(memory.free) == 1
    assert _memory.empty((SIZE,), FLOAT).ctypes.data == place


@pytest.mark.parametrize(
    "view", [lambda x: x[3:5], lambda x: x.reshape(2, -1).T, memoryview, lambda x: x.view(np.int32)]
)
def test_memory_in_use_is_not_given_away(memory: Any, view: Any) -> None:
    x = _memory.empty((SIZE,), FLOAT)
    x[:] = 7
    kept = view(x)
    del x
    gc.collect()
    y = _memory.empty((SIZE,), FLOAT)
    y[:] = 8
    assert (np.asarray(kept).view(np.float32) == 7).all()
    del kept, y
    gc.collect()
    assert len(memory.free) == 2
    assert not memory.leases


def test_a_tensor_of_it_is_in_use(memory: Any) -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(_memory.empty((SIZE,), FLOAT))[1:]
    gc.collect()
    assert not memory.free
    del x
    gc.collect()
    assert len(memory.free) == 1


def test_small_arrays_are_the_librarys_own(memory: Any) -> None:
    assert _memory.empty((SIZE - 1,), FLOAT).base is None
    assert not memory.leases


def test_the_oldest_are_freed_beyond_the_limit(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "MOST", 3 * _memory.LEAST)
    arrays = [_memory.empty((SIZE,), FLOAT) for _ in range(5)]
    arrays.clear()
    gc.collect()
    assert len(memory.free) == 2  # a block is a little larger than its array
    assert not memory.leases


def test_threads_get_memory_of_their_own(memory: Any) -> None:
    failures = []

    def work(number: int) -> None:
        for _ in range(200):
            x = _memory.empty((SIZE,), FLOAT)
            x[:: SIZE // 8] = number
            if not (x[:: SIZE // 8] == number).all():
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not failures
    assert not memory.leases
    assert len(memory.free) <= 4
