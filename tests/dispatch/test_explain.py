"""``explain`` names the kernel for arrays of another library, with their dtype and shape there."""

import numpy as np
import pytest

import polyattn as pa


@pytest.mark.parametrize("given", ["mask", "bias", "integers"])
def test_the_kernel_that_is_told_is_the_one_that_computes(given, home, place, native):
    q = native(home, np.ones((2, 4, 8), dtype=np.float32))
    arguments = {
        "mask": {"mask": native(home, np.tri(4, dtype=bool))},
        "bias": {"bias": native(home, np.zeros((4, 4), dtype=np.float32))},
        "integers": {"segment_ids": (native(home, np.array([0, 0, 1, 1])),) * 2},
    }[given]
    with pa.transfers() as account:
        told = pa.explain(q, q, q, backend=place, **arguments)
    assert account.count == 0
    _, cache = pa.attention_forward(q, q, q, backend=place, **arguments)
    assert told.kernel == cache.kernel
    assert (told.backend, told.moved_from is None) == (place, home == place)
