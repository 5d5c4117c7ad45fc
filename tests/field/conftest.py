"""What the tests of reports share: one call of attention, compared with the reference."""

from typing import NamedTuple

import numpy as np
import pytest

import polyattn as pa
from polyattn.testing import assert_close
from polyattn.testing import references as ref


class Compared(NamedTuple):
    """Results on the host, after they agreed with the reference."""

    out: np.ndarray
    grads: pa.functional.AttentionGrads


@pytest.fixture
def agrees(make, to_np):
    """Return ``agrees(q, k, v, dtype, **arguments)``: forward and backward, compared with the float64 reference.

    ``instead`` has arguments that polyattn takes instead of the reference's, such as a block mask for a dense one.
    """

    def native(x, dtype):
        return make(x, {"b": "bool", "i": "int32", "f": dtype}[x.dtype.kind])

    def given(x, dtype):
        if isinstance(x, tuple) and isinstance(x[0], np.ndarray):
            return tuple(native(ids, dtype) for ids in x)
        return native(x, dtype) if isinstance(x, np.ndarray) else x

    def compare(q, k, v, dtype="float64", instead=None, **arguments):
        arrays = [make(x, dtype) for x in (q, k, v)]
        natives = {name: given(x, dtype) for name, x in arguments.items()}
        held = [to_np(x).astype(np.float64) for x in arrays]
        hosts = {name: to_np(natives[name]) if name in ("bias", "sinks") else x for name, x in arguments.items()}
        out, cache = pa.attention_forward(*arrays, **natives | (instead or {}))
        assert_close(to_np(out), ref.attention(*held, **hosts).out, dtype)
        dout = make(np.random.default_rng(14).standard_normal(out.shape), dtype)
        grads = pa.attention_backward(dout, cache)
        slopes = ref.attention_gradients(to_np(dout), *held, **hosts)
        for name, want in slopes._asdict().items():
            if want is not None:  # rows that see one key have gradients of zero, whose terms are near one
                size = max(1.0, np.abs(want).max(initial=0.0))
                assert_close(to_np(getattr(grads, name)), want, dtype, scale=size, what=f"gradient of {name}")
        return Compared(to_np(out), type(grads)(*(None if x is None else to_np(x) for x in grads)))

    return compare
