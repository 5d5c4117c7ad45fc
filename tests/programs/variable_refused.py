"""The first computation where POLYATTN_BACKEND names what cannot be used: it prints what is said of that."""

import numpy as np

import polyattn as pa

try:
    pa.functional.softmax(np.ones(3))
except pa.BackendUnavailableError as error:
    print(error)
