"""A backward whose buffers do not fit in the memory that the process may have: an error with their size."""

import re
import resource
from pathlib import Path

import numpy as np
import pytest

import polyattn as pa

n, d = 2**20, 64
q, k = np.ones((1, 1, d), np.float32), np.broadcast_to(np.ones(d, np.float32), (1, n, d))
out, cache = pa.attention_forward(q, k, k, kernel="native")
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
gradients = 2 * n * d * 4
resource.setrlimit(resource.RLIMIT_AS, (in_use + gradients + 2**27, resource.RLIM_INFINITY))
with pytest.raises(MemoryError, match=r"a buffer of \d+ bytes") as caught:
    pa.attention_backward(out, cache)
assert int(re.findall(r"\d+", str(caught.value))[0]) > gradients
