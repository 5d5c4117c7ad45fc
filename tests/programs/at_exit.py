"""Attention at the interpreter's exit, when the pool of the NumPy backend takes no more work."""

import atexit

import numpy as np

import polyattn as pa
from polyattn_numpy import _blocked

_blocked.WORTHWHILE, _blocked.thread_count = 0, lambda: 2
q = np.zeros((1, 4, 300, 16), dtype=np.float32)
pa.attention(q, q, q)
atexit.register(lambda: print(pa.attention(q, q, q).shape))
