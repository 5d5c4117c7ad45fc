"""CuPy that cannot be used, for the reason in the argument: an error wherever it is selected, without side effects."""

import re
import sys

import numpy as np
import pytest

import polyattn as pa

(reason,) = sys.argv[1:]
for attempt in (
    lambda: pa.set_backend("cupy"),
    lambda: pa.attention(*[np.ones((2, 3))] * 3, backend="cupy"),
    lambda: pa.to_backend(np.ones(2), "cupy", device="cuda:0"),
    lambda: pa.Projection(2, 2, backend="cupy"),
    lambda: pa.Projection(2, 2).to("cupy"),
):
    with pytest.raises(pa.BackendUnavailableError, match=re.escape(f"is unavailable: {reason}")):
        attempt()
assert pa.get_backend() is None
with pa.use_backend("numpy"):
    print(pa.functional.softmax(np.zeros(2)))
