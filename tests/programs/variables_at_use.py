"""POLYATTN_BACKEND names no backend at first; it is read at each use."""

import os

import numpy as np

import polyattn as pa

try:
    pa.attention(*[np.ones((2, 2))] * 3)
except pa.UnknownBackendError:
    print("refused")
os.environ["POLYATTN_BACKEND"] = "numpy"
print(pa.get_backend().source)
del os.environ["POLYATTN_BACKEND"]
print(pa.get_backend())
