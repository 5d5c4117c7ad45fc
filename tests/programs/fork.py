"""A large product and attention in the parent, attention in the child, again in the parent: all end, all right."""

import os
import signal
import warnings

import numpy as np

import polyattn as pa

warnings.simplefilter("ignore", DeprecationWarning)  # newer Python warns of a fork with threads, which is the subject
rng = np.random.default_rng(0)
x = rng.standard_normal((2, 64, 32))
a = rng.standard_normal((512, 512))
a @ a


def attend():
    out, cache = pa.attention_forward(x, x, x, causal=True)
    return np.concatenate([out, *pa.attention_backward(out, cache)[:3]])


serial = attend()
child = os.fork()
if child == 0:
    signal.alarm(30)
    a @ a
    os._exit(0 if np.array_equal(attend(), serial) else 1)
signal.alarm(30)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert np.array_equal(attend(), serial)
