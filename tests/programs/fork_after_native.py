"""A fork after a call on the threads of the native library, of which the child process has none."""

import os
import sys
import warnings

import numpy as np

import polyattn as pa
from polyattn_native import _kernel

warnings.simplefilter("ignore", DeprecationWarning)  # newer Python warns of a fork with threads, which is the subject
_kernel.threads_of = lambda problem: int(sys.argv[1])
q = np.random.default_rng(0).standard_normal((8, 200, 16)).astype(np.float32)
want, cache = pa.attention_forward(q, q, q)
assert cache.kernel == "native"
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(pa.attention(q, q, q), want) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert np.array_equal(pa.attention(q, q, q), want)
