"""CuPy that cannot be used, for the reason in the argument: it is listed with it, and other backends compute."""

import sys

import numpy as np

import polyattn as pa

(reason,) = sys.argv[1:]
infos = {info.name: info for info in pa.list_backends()}
cupy = infos.pop("cupy")
assert (cupy.state, cupy.version, cupy.reason, cupy.devices) == ("unavailable", "13.6.0", reason, ()), cupy
x = np.arange(6, dtype=np.float32).reshape(2, 3)
for info in infos.values():
    if info.state == "ready":
        with pa.use_backend(info.name):
            assert np.allclose(pa.functional.softmax(x).sum(axis=-1), 1)


class Unknown:
    dtype = shape = None


try:
    pa.to_backend(Unknown(), "numpy")  # every plugin is asked
except pa.BackendMismatchError:
    print("done")
