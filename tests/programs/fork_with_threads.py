"""A fork while another thread holds the BLAS and threads wait in the pool of the NumPy backend."""

import os
import threading
import warnings

import numpy as np
from threadpoolctl import threadpool_limits

import polyattn as pa
from polyattn_native._threads import _blas_threads
from polyattn_numpy import _blocked, _threads

warnings.simplefilter("ignore", DeprecationWarning)  # newer Python warns of a fork with threads, which is the subject
_blocked.WORTHWHILE, _blocked.thread_count = 0, lambda: 2
threadpool_limits(2, user_api="blas")
q = np.random.default_rng(0).standard_normal((1, 4, 300, 16)).astype(np.float32)
want = pa.attention(q, q, q)
held, release = threading.Event(), threading.Event()


def work(_):
    held.set()
    release.wait()


caller = threading.Thread(target=_threads.run, args=(lambda: work, range(1), 1))
caller.start()
held.wait()
child = os.fork()
if child == 0:
    alone = _blas_threads() == 2 and np.array_equal(pa.attention(q, q, q), want)
    os._exit(0 if alone and _blas_threads() == 2 else 1)
_, status = os.waitpid(child, 0)
release.set()
caller.join()
assert os.waitstatus_to_exitcode(status) == 0
assert _blas_threads() == 2
assert np.array_equal(pa.attention(q, q, q), want)
