"""Forks while another thread computes: ``python fork_while_busy.py BACKEND COUNT SEED``.

A thread keeps the threads of the native library busy. At random moments the process forks; the child computes on the
same backend, gets the same bits, and ends. So do the threads of the parent.
"""

import os
import signal
import sys
import threading
import time
import warnings

import numpy as np

import polyattn as pa
from polyattn_native import _kernel

NAME, COUNT, SEED = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
warnings.simplefilter("ignore")  # Python warns of a fork with threads, which is the subject, and so does JAX
_kernel.threads_of = lambda problem: 2
rng = np.random.default_rng(SEED)
big, small = (
    pa.to_backend(rng.standard_normal((1, 4, n, 16)).astype(np.float32), NAME) for n in ((200, 8))
)  # fmt: skip


def attend(x):
    out, cache = pa.attention_forward(x, x, x, causal=True)
    return [np.asarray(pa.to_backend(y, "numpy")).tobytes() for y in (out, *pa.attention_backward(out, cache)[:3])]


def decode():
    cache = pa.KVCache.create(1, 4, 8, 16, backend=NAME).append(small, small)
    return np.asarray(pa.to_backend(cache.attention(small), "numpy")).tobytes()


def busy():
    while not ended.is_set():
        wrong.append(attend(big) != wants[0])


wants = attend(big), attend(small), decode()
ended, wrong = threading.Event(), []
thread = threading.Thread(target=busy)
thread.start()
try:
    for i in range(COUNT):
        time.sleep(rng.uniform(0, 0.003))
        child = os.fork()
        if child == 0:
            signal.alarm(30)  # a child that waits for ever is ended by this
            os._exit((attend(small), attend(big), decode()) != (wants[1], wants[0], wants[2]))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == 0, f"fork {i} of seed {SEED}: the child ended with {code}"
finally:
    ended.set()
    thread.join()
assert wrong, "the thread has computed nothing"
assert not any(wrong)
