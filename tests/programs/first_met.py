"""A backend, by name, that sixteen threads need first at once: ``python first_met.py NAME``."""

import sys
import threading

import numpy as np

import polyattn as pa

(name,) = sys.argv[1:]
gate, faults = threading.Barrier(16), []


def work(i):
    x = np.full((2, 3), i, dtype=np.float32)
    gate.wait()
    try:
        y, cache = pa.attention_forward(x, x, x, backend=name)
        pa.attention_backward(y, cache)
        assert type(y) is np.ndarray
        assert np.allclose(y, i)
        assert cache.place.backend.name == name
    except BaseException as fault:
        faults.append(fault)


threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not faults, faults
